"""The worker that an id, a name or a host selects."""

from __future__ import annotations

from uuid import UUID, uuid5

import pytest

from orchestrator.domain.fleet.announced import FleetProcess, matching_workers


def parent_id(name: str) -> UUID:
    return uuid5(UUID(int=0), name)


def process(id: str, parent: str = "", state: str = "live", host: str = "web") -> FleetProcess:
    return FleetProcess(id=id, host=host, state=state, parent=parent_id(parent) if parent else None)


FLEET = [
    process("web-1-aa", "first"),
    process("web-1-bb", "first", "draining"),
    process("web-2-cc", "second"),
    process("db-7-dd", "third", host="db.example.com"),
]


def selected_ids(wanted: str, *others: FleetProcess) -> list[list[str]]:
    return [[one.id for one in processes] for processes in matching_workers([*FLEET, *others], wanted)]


def test_any_process_id_selects_the_whole_worker() -> None:
    assert selected_ids("web-1-aa") == selected_ids("web-1-bb") == selected_ids("web-1") == [["web-1-aa", "web-1-bb"]]


def test_a_host_selects_each_of_its_workers_separately() -> None:
    assert selected_ids("db.example.com") == [["db-7-dd"]]
    assert selected_ids("web") == [["web-1-aa", "web-1-bb"], ["web-2-cc"]]


@pytest.mark.parametrize("wanted", ["", "web-1-a", "web-3", "db", "aa"])
def test_a_part_of_a_name_selects_no_worker(wanted: str) -> None:
    assert selected_ids(wanted) == []


@pytest.mark.parametrize("state", ["dead", "stopped"])
def test_an_earlier_worker_of_the_same_name_is_kept_apart(state: str) -> None:
    """In a container, the parent is always process 1 of the same host."""
    before = process("web-1-ee", "before", state)
    assert selected_ids("web-1", before) == [["web-1-aa", "web-1-bb"]]
    assert selected_ids("web-1-ee", before) == [["web-1-ee"]]


def test_a_name_prefers_silent_workers_to_stopped_workers() -> None:
    silent, over = process("old-1-ff", "silent", "dead"), process("old-1-gg", "over", "stopped")
    assert selected_ids("old-1", silent, over) == [["old-1-ff"]]
    assert selected_ids("old-1", over) == [["old-1-gg"]]


def test_processes_without_a_parent_are_grouped_by_name() -> None:
    """Processes of an earlier release report no parent."""
    assert selected_ids("was-1", process("was-1-hh"), process("was-1-ii")) == [["was-1-hh", "was-1-ii"]]
