"""Which worker somebody means who gives an id, a name or a host."""

from __future__ import annotations

from uuid import UUID, uuid5

import pytest

from orchestrator.domain.fleet.announced import FleetProcess, matching_workers


def life(name: str) -> UUID:
    return uuid5(UUID(int=0), name)


def process(id: str, parent: str = "", state: str = "live", host: str = "web") -> FleetProcess:
    return FleetProcess(id=id, host=host, state=state, parent=life(parent) if parent else None)


FLEET = [
    process("web-1-aa", "first"),
    process("web-1-bb", "first", "draining"),
    process("web-2-cc", "second"),
    process("db-7-dd", "third", host="db.example.com"),
]


def ids(wanted: str, *others: FleetProcess) -> list[list[str]]:
    return [[one.id for one in processes] for processes in matching_workers([*FLEET, *others], wanted)]


def test_any_process_of_a_worker_stands_for_all_of_it() -> None:
    assert ids("web-1-aa") == ids("web-1-bb") == ids("web-1") == [["web-1-aa", "web-1-bb"]]


def test_a_host_stands_for_the_worker_on_it_and_two_are_two() -> None:
    assert ids("db.example.com") == [["db-7-dd"]]
    assert ids("web") == [["web-1-aa", "web-1-bb"], ["web-2-cc"]]


@pytest.mark.parametrize("wanted", ["", "web-1-a", "web-3", "db", "aa"])
def test_a_part_of_a_name_stands_for_nobody(wanted: str) -> None:
    assert ids(wanted) == []


@pytest.mark.parametrize("state", ["dead", "stopped"])
def test_a_worker_of_before_with_the_same_name_is_another(state: str) -> None:
    """In a container the parent is process 1 of the same host, every time."""
    before = process("web-1-ee", "before", state)
    assert ids("web-1", before) == [["web-1-aa", "web-1-bb"]]
    assert ids("web-1-ee", before) == [["web-1-ee"]]


def test_who_is_silent_is_meant_if_nobody_else_can_be() -> None:
    silent, over = process("old-1-ff", "silent", "dead"), process("old-1-gg", "over", "stopped")
    assert ids("old-1", silent, over) == [["old-1-ff"]]
    assert ids("old-1", over) == [["old-1-gg"]]


def test_processes_that_do_not_say_whose_they_are_go_by_their_name() -> None:
    """They are of an earlier release."""
    assert ids("was-1", process("was-1-hh"), process("was-1-ii")) == [["was-1-hh", "was-1-ii"]]
