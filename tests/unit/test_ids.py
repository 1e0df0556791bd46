"""Ids sort by time, and derived ids are deterministic."""

from __future__ import annotations

from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.ids import derived_id, time_ordered_id, to_text

noises = st.binary(min_size=10, max_size=10)
times = st.integers(0, 2**48 - 1)


@given(times, noises)
def test_an_id_is_a_uuid_of_version_seven(milliseconds: int, noise: bytes) -> None:
    identifier = UUID(bytes=time_ordered_id(milliseconds, noise))
    assert identifier.version == 7
    assert identifier.variant == RFC_4122
    assert identifier.int >> 80 == milliseconds
    assert to_text(identifier.bytes) == str(identifier)


@given(times, times, noises, noises)
def test_ids_sort_by_time(one: int, other: int, noise: bytes, more: bytes) -> None:
    if one != other:
        assert (one < other) == (time_ordered_id(one, noise) < time_ordered_id(other, more))


@given(noises, noises)
def test_all_random_bits_that_fit_are_used(noise: bytes, more: bytes) -> None:
    def kept(raw: bytes) -> bytes:
        return bytes((raw[0] & 0x0F, raw[1], raw[2] & 0x3F)) + raw[3:]

    same = time_ordered_id(7, noise) == time_ordered_id(7, more)
    assert same == (kept(noise) == kept(more))


parents = st.builds(time_ordered_id, times, noises)
parts = st.tuples(st.one_of(st.integers(), st.text()), st.integers())


@given(parents, parts)
def test_derived_ids_are_deterministic(parent: bytes, chosen: tuple[str | int, int]) -> None:
    identifier = derived_id(parent, *chosen)
    assert identifier == derived_id(bytes(parent), *chosen)
    assert UUID(bytes=identifier).version == 8
    assert UUID(bytes=identifier).variant == RFC_4122
    assert identifier[:6] == parent[:6]


@given(st.lists(st.tuples(parents, parts), unique=True, max_size=50))
def test_derived_ids_are_distinct(origins: list[tuple[bytes, tuple[str | int, int]]]) -> None:
    assert len({derived_id(parent, *chosen) for parent, chosen in origins}) == len(origins)


def test_differently_split_parts_derive_different_ids() -> None:
    parent = time_ordered_id(1, bytes(10))
    assert len({derived_id(parent, *parts) for parts in [(1, 23), (12, 3), (123,), ("1", 23), ("1, 23",)]}) == 5


@pytest.mark.slow
def test_an_attempt_derives_a_hundred_thousand_ids() -> None:
    parent = time_ordered_id(1, bytes(10))
    assert len({derived_id(parent, attempt, count) for attempt in range(10) for count in range(10_000)}) == 100_000
