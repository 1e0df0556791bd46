"""Any bytes decode to a message or raise Malformed, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.domain.code.activation import Activation
from orchestrator.domain.code.history import Event
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import (
    Dispatch,
    Enqueued,
    Failed,
    Lost,
    NewTask,
    Returned,
    Started,
    Succeeded,
    TaskError,
)
from orchestrator.transport import codec
from orchestrator.transport.codec import (
    Applied,
    Ended,
    Heartbeat,
    Malformed,
    Order,
    Word,
    decode,
    decode_dispatches,
    decode_flush,
    encode,
    names_digest,
    pack_attempt,
    stream_position,
    unpack_attempts,
)
from orchestrator.workers.parent.messages import Command, Hello, Leaving
from tests.fuzzing import examples

ids = st.binary(min_size=16, max_size=16)
attempts = st.integers(1, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
seconds = st.floats(0, 1e6)
optional_ids = st.none() | ids
new_tasks = st.builds(
    NewTask, ids, texts, texts, st.binary(max_size=30), st.integers(-100, 100), seconds, st.none() | texts, optional_ids
)
errors = st.builds(TaskError, texts, texts, texts)
all_reports: st.SearchStrategy[Report] = st.one_of(
    st.builds(Started, ids, attempts, seconds),
    st.builds(Succeeded, ids, attempts, seconds, st.binary(max_size=30), st.lists(new_tasks, max_size=3)),
    st.builds(Failed, ids, attempts, seconds, errors, st.booleans()),
    st.builds(Returned, ids, attempts, texts, seconds),
    st.builds(Lost, ids, attempts, st.booleans()),
    st.builds(Enqueued, st.lists(new_tasks, max_size=3)),
)
flushes = st.builds(Flush, texts, st.lists(all_reports, max_size=5))
dispatches = st.lists(
    st.builds(Dispatch, ids, attempts, texts, st.binary(max_size=30), texts, st.none() | texts, optional_ids),
    max_size=5,
)


@given(flushes)
@pytest.mark.slow
def test_a_flush_survives_encoding(flush: Flush) -> None:
    assert decode_flush(encode(flush)) == flush


@given(dispatches)
@pytest.mark.slow
def test_dispatches_survive_encoding(tasks: list[Dispatch]) -> None:
    assert decode_dispatches(encode(tasks)) == tasks


# -- fuzz


def understood(read: Callable[[bytes], Any], data: bytes) -> bool:
    """Return whether the bytes are a message; fail for any error but Malformed."""
    try:
        message = read(data)
    except Malformed:
        return False
    assert isinstance(message, (Flush, list))
    return True


READERS = [decode_flush, decode_dispatches]


@examples(400)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")  # an array of four billion
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x92\xa1w\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")  # four gigabytes
@example(b"\x92\xa2\xff\xfe\x90")  # text that is not UTF-8
@example(b"\xc7\x0c\xff" + b"\xff" * 12)  # an impossible timestamp
@example(b"\x91" * 100_000)  # endless nesting
@example(b"\x92\xa1w" + b"\x91" * 100_000)
@example(b"\x81" * 100_000)
@pytest.mark.slow
def test_random_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for read in READERS:
        understood(read, data)


def mutate(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, cut, inserted in changes:
        at = place % (len(data) + 1)
        data = data[:at] + inserted + data[at + cut :]
    return data


changes = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 4), st.binary(max_size=6)), min_size=1, max_size=4)


@examples(150)
@given(flushes, changes)
@pytest.mark.slow
def test_mutated_flushes_are_a_message_or_malformed(flush: Flush, damage: list[tuple[int, int, bytes]]) -> None:
    understood(decode_flush, mutate(encode(flush), damage))


@examples(250)
@given(dispatches, changes)
@pytest.mark.slow
def test_mutated_dispatches_are_messages_or_malformed(
    tasks: list[Dispatch], damage: list[tuple[int, int, bytes]]
) -> None:
    understood(decode_dispatches, mutate(encode(tasks), damage))


@given(flushes, st.integers(0, 10_000))
@pytest.mark.slow
def test_a_truncated_flush_is_malformed(flush: Flush, place: int) -> None:
    data = encode(flush)
    assert not understood(decode_flush, data[: place % len(data)])


structures = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | texts
    | st.sampled_from(["started", "succeeded", "failed", "returned", "lost", "enqueued"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts | st.integers(-5, 5), inner, max_size=4),
    max_leaves=30,
)


@examples(150)
@given(structures)
@pytest.mark.slow
def test_other_messagepack_data_is_a_message_or_malformed(value: Any) -> None:
    """Well-formed MessagePack of other structures."""
    for read in READERS:
        understood(read, encode(value))
        understood(read, encode(["w", [value]]))
        understood(read, encode([value]))


@examples(100)
@given(structures | st.lists(structures, max_size=14))
@example(b"\x91" * 50_000)
@pytest.mark.slow
def test_other_message_types_decode_or_are_malformed(value: Any) -> None:
    kinds: tuple[Any, ...] = (Heartbeat, Order, list[Ended], Applied, list[Word], Hello | Leaving, Command)
    for kind in kinds:
        for data in (encode(value), value if isinstance(value, bytes) else b""):
            try:
                decode(kind, data)
            except Malformed as error:
                assert "expected" in str(error)


heartbeats = st.builds(
    Heartbeat,
    worker=texts,
    host=texts,
    pid=st.integers(-5, 2**33),
    queues=st.lists(texts, max_size=3),
    slots=st.integers(-5, 2**33),
    names=texts,
    generation=texts,
    started_at=st.floats(),
    held=st.binary(max_size=50),
    running=st.integers(-5, 2**33),
)


@examples(150)
@given(heartbeats)
@pytest.mark.slow
def test_a_decoded_heartbeat_can_be_stored(beat: Heartbeat) -> None:
    try:
        found = decode(Heartbeat, encode(beat))
    except Malformed:
        return
    assert "\0" not in "".join([found.worker, found.host, found.names, *found.queues])
    assert all(0 <= number < 2**31 for number in (found.pid, found.slots, found.running))
    assert 0 <= found.started_at < 1e11
    unpack_attempts(found.held)


@examples(150)
@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,25}-[0-9]{0,25}", fullmatch=True))
@pytest.mark.slow
def test_a_decoded_position_can_be_compared(cursor: str) -> None:
    try:
        applied = decode(Applied, msgspec.msgpack.encode(["1-1", cursor]))
    except (Malformed, UnicodeEncodeError):
        return
    assert stream_position(applied.cursor) >= (0, 0)


@pytest.mark.slow
def test_malformed_names_the_expected_type() -> None:
    with pytest.raises(Malformed, match="Flush.* expected"):
        decode_flush(b"\x01")
    with pytest.raises(Malformed, match="Dispatch.* expected"):
        decode_dispatches(b"\x01")


# -- compatibility: the order of fields is the wire format


@pytest.mark.slow
def test_a_newer_release_may_add_fields_at_the_end() -> None:
    fields = msgspec.msgpack.decode(encode(Dispatch(b"i" * 16, 1, "n", b"p", "q")))
    assert decode_dispatches(encode([[*fields, "something new"]])) == [Dispatch(b"i" * 16, 1, "n", b"p", "q")]
    started = msgspec.msgpack.decode(encode(Started(b"i" * 16, 1, 0.5)))
    assert decode_flush(encode(["w", [[*started, "new"]], [], "new"])) == Flush("w", [Started(b"i" * 16, 1, 0.5)])


@pytest.mark.slow
def test_an_older_release_may_leave_the_last_fields_out() -> None:
    assert decode_dispatches(encode([[b"i" * 16, 1, "n", b"p", "q"]])) == [Dispatch(b"i" * 16, 1, "n", b"p", "q")]
    assert decode_flush(encode(["w", [["returned", b"i" * 16, 1, "r"]]])) == Flush("w", [Returned(b"i" * 16, 1, "r")])


# -- heartbeats and stream positions


@given(st.lists(st.tuples(ids, st.integers(1, 2**32 - 1)), max_size=20), st.binary(max_size=19))
@pytest.mark.slow
def test_held_attempts_survive_packing(held: list[tuple[bytes, int]], torn: bytes) -> None:
    packed = b"".join(pack_attempt(*attempt) for attempt in held)
    assert unpack_attempts(packed) == held
    assert unpack_attempts(packed + torn) == held


@given(st.tuples(st.integers(0, 2**63), st.integers(0, 2**63)), st.tuples(st.integers(0, 2**63), st.integers(0, 2**63)))
@pytest.mark.slow
def test_stream_positions_compare_as_numbers(one: tuple[int, int], other: tuple[int, int]) -> None:
    positions = [stream_position(f"{milliseconds}-{sequence}") for milliseconds, sequence in (one, other)]
    assert positions == [one, other]
    assert stream_position("9-9") < stream_position("10-0") < stream_position("10-2") < stream_position("10-10")


@given(st.lists(texts, unique=True))
@pytest.mark.slow
def test_the_digest_of_names_ignores_their_order(names: list[str]) -> None:
    assert names_digest(names) == names_digest(names[::-1])
    assert names_digest([*names, "one more\x01"]) != names_digest(names)


@pytest.mark.slow
def test_a_packed_attempt_has_twenty_bytes() -> None:
    assert pack_attempt(b"i" * 16, 258) == b"i" * 16 + struct.pack(">I", 258)


@pytest.mark.slow
def test_decoders_are_built_at_import() -> None:
    """Threads that build the decoder of a type at the same time crash the process."""
    with pytest.raises(KeyError):
        codec.decode(dict[str, list[bool]], b"")
    assert {Activation, list[Event], list[Dispatch], Flush} <= codec._decoders.keys()
