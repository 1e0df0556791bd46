"""How many stream entries are read at once."""

from __future__ import annotations

from orchestrator.transport.leader.streams import MAX_READ_BYTES, BatchSizes


def entries(*sizes: int) -> list[tuple[str, bytes]]:
    return [(f"{place}-0", bytes(size)) for place, size in enumerate(sizes)]


def test_small_entries_are_read_by_the_thousand() -> None:
    sizes = BatchSizes()
    assert sizes.number(1_000) == 1_000
    assert len(sizes.cut(entries(*[100] * 1_000), 1_000)) == 1_000
    assert sizes.number(1_000) == 1_000


def test_large_entries_are_cut_and_the_next_batch_is_smaller() -> None:
    sizes = BatchSizes()
    assert len(sizes.cut(entries(*[MAX_READ_BYTES // 2] * 10), 1_000)) == 2
    assert sizes.number(1_000) == 2


def test_one_entry_is_read_however_large_it_is() -> None:
    assert len(BatchSizes().cut(entries(3 * MAX_READ_BYTES, 1), 1_000)) == 1


def test_batches_grow_when_entries_are_small_again() -> None:
    sizes = BatchSizes()
    sizes.cut(entries(MAX_READ_BYTES, MAX_READ_BYTES), 1_000)
    asked = [sizes.number(1_000)]
    for _ in range(11):
        sizes.cut(entries(*[10] * asked[-1]), asked[-1])
        asked.append(sizes.number(1_000))
    assert asked[0] == 1
    assert asked[-1] == 1_000
