"""The parts of live events that need no server: cursors, buffers, shared reads, and summaries of missed changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from uuid import UUID

import msgspec
import pytest

from orchestrator.api.live import listener as listeners
from orchestrator.api.live.listener import Cursor, Listener, parse
from orchestrator.api.live.reads import Batches
from orchestrator.api.live.subjects import SYSTEM, Kind, Subject, event, missed, version
from orchestrator.transport.changes import Entry
from orchestrator.transport.codec import Changes, RunChange, TaskChange, WorkerChange

TASK, RUN = b"t" * 16, b"r" * 16
START = Cursor("1-1-abc", "5-0")


def change(
    status: str, attempt: int = 1, *, id: bytes = TASK, queue: str = "a", run: bytes | None = None
) -> TaskChange:
    return TaskChange(id, queue, "job", status, attempt, run)


@pytest.mark.parametrize("place", [START, Cursor("1-1-abc", "17-3", "9-1"), Cursor("1-1", "17-3")])
def test_a_cursor_round_trips_as_text(place: Cursor) -> None:
    assert parse(str(place)) == place


@pytest.mark.parametrize("text", ["", "end", "5-0", "a:b", "1-1:5-0~", "1-1:5-0\n", "1-1:" + "9" * 30 + "-0", ":5-0"])
def test_an_invalid_cursor_is_parsed_as_none(text: str) -> None:
    assert parse(text) is None


def test_an_event_without_a_cursor_has_no_id() -> None:
    assert str(Cursor("1-1", "0-0")) == ""
    assert event("a", 1, "") == b"event: a\ndata: 1\n\n"
    assert event("a", "x\ny", "5") == b'id: 5\nevent: a\ndata: "x\\ny"\n\n'


def test_versions_of_a_task_only_grow() -> None:
    life = [("pending", 0), ("dispatched", 1), ("running", 1), ("pending", 1), ("dispatched", 2), ("failed", 2)]
    ages = [version(change(status, attempt)) for status, attempt in life]
    assert ages == sorted(set(ages))


def test_changes_during_the_snapshot_follow_the_snapshot() -> None:
    async def listen() -> bytes:
        listener = Listener(Subject(Kind.QUEUE, "a"), START)
        listener.send(b"later ")
        assert await listener.next_chunk(0.001) == b""
        listener.begin(b"first ")
        listener.send(b"last")
        return await listener.next_chunk(1)

    assert asyncio.run(listen()) == b"first later last"


def test_a_slow_listener_loses_its_buffer_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_MAX_BUFFER", 10)

    async def listen() -> None:
        listener = Listener(Subject(Kind.TASK, TASK), START)
        listener.begin(b"a snapshot may be as long as it likes")
        assert not listener.is_lagging
        listener.log = "7-0"
        listener.send(b"12345678")
        listener.send(b"12345678")
        assert listener.is_lagging
        listener.send(b"1")
        assert await listener.next_chunk(1) == b""
        assert listener.log == "0-0", "lines that were thrown away are read again"
        assert listener.restart(START._replace(entry="6-0")) == 1
        listener.send(b"12345678")
        listener.begin(b"anew ")
        assert await listener.next_chunk(1) == b"anew 12345678"

    asyncio.run(listen())


def test_log_lines_wait_for_a_slow_reader_and_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_MAX_BUFFER", 10)

    async def listen() -> tuple[bytes, bool]:
        listener = Listener(Subject(Kind.TASK, TASK), START)
        listener.begin(b"first ")

        async def hear() -> None:
            for _ in range(20):
                await listener.send_log_line(b"line ")

        hearing = asyncio.create_task(hear())
        said = b""
        while not hearing.done():
            said += await listener.next_chunk(1)
        said += await listener.next_chunk(0.001)
        waiting = asyncio.create_task(hear())
        await asyncio.sleep(0)
        listener.close()  # the reader has disconnected
        await asyncio.wait_for(waiting, 5)
        return said, listener.is_lagging

    assert asyncio.run(listen()) == (b"first " + 20 * b"line ", False)


def test_a_listener_too_slow_for_its_snapshot_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_MAX_EARLY_BUFFER", 10)

    async def listen() -> None:
        listener = Listener(Subject(Kind.QUEUE, "a"), START)
        listener.send(b"12345678")
        listener.send(b"12345678")
        listener.begin(b"a snapshot that is too old by now")
        await listener.next_chunk(1)
        assert listener.is_lagging

    asyncio.run(listen())


def test_callers_share_a_read_only_before_the_read_begins() -> None:
    reads: list[list[int]] = []
    begun, go = threading.Event(), threading.Event()

    def read(keys: Sequence[int]) -> dict[int, int]:
        reads.append(sorted(keys))
        begun.set()
        assert go.wait(60)
        return {key: len(reads) for key in keys}

    async def ask() -> list[int]:
        batches = Batches(read)
        early = [asyncio.create_task(batches.get(key)) for key in (1, 2, 1)]
        assert await asyncio.to_thread(begun.wait, 60)
        late = asyncio.create_task(batches.get(1))
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*early, late)

    assert asyncio.run(ask()) == [1, 1, 1, 2]
    assert reads == [[1, 2], [1]]


def test_a_failed_read_raises_only_in_its_callers() -> None:
    failures = [ValueError("no")]

    def read(keys: Sequence[int]) -> dict[int, int]:
        if failures:
            raise failures.pop()
        return dict.fromkeys(keys, 7)

    async def ask() -> list[object]:
        batches = Batches(read)
        first = await asyncio.gather(batches.get(1), batches.get(2), return_exceptions=True)
        return [*map(type, first), await batches.get(1)]

    assert asyncio.run(ask()) == [ValueError, ValueError, 7]


def data_of(said: bytes) -> list[object]:
    return [msgspec.json.decode(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: ")]


def test_missed_changes_are_summarized_for_each_subject() -> None:
    entries = [
        Entry("6-0", Changes("g", tasks=[change("dispatched", run=RUN), change("dispatched", id=b"u" * 16)])),
        Entry("7-0", Changes("g", tasks=[change("success", run=RUN), change("success", queue="b")])),
        Entry(
            "8-0", Changes("g", runs=[RunChange(RUN, "success"), RunChange(RUN)], workers=[WorkerChange("w", "gone")])
        ),
    ]
    (told,) = data_of(missed(Subject(Kind.RUN, RUN), entries).events("8-0"))
    assert [(task["id"], task["status"], task["run_id"]) for task in told["tasks"]] == [  # type: ignore[index]
        (str(UUID(bytes=TASK)), status, str(UUID(bytes=RUN))) for status in ("dispatched", "success")
    ]
    (told,) = data_of(missed(Subject(Kind.QUEUE, "b"), entries).events("8-0"))
    assert [task["status"] for task in told["tasks"]] == ["success"]  # type: ignore[index]
    assert data_of(missed(SYSTEM, entries).events("8-0")) == [
        {"queues": {"a": {"dispatched": 2, "success": 1}, "b": {"success": 1}}, "runs": {"success": 1}},
        {"workers": [{"id": "w", "state": "gone"}]},
    ]
    assert missed(Subject(Kind.QUEUE, "c"), entries).events("8-0") == b""
