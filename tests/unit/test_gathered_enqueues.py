"""Which enqueue calls share a commit, and when the commit begins. The tests decide when commits end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from orchestrator.domain.tasks.task import NewTask, UniqueKey
from orchestrator.sdk.backend import shared_commits as shared
from orchestrator.sdk.backend.shared_commits import Outcome


class Commits:
    """Commits in progress, each with the numbers of its tasks."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.alone: list[list[int]] = []
        self._ends: list[Future[Sequence[Outcome]]] = []
        self._last: list[Future[Sequence[Outcome]]] = []
        self.gathering = shared._Batches(asyncio.get_running_loop(), self._store, self._store_alone)

    def _store(self, tasks: Sequence[NewTask]) -> Future[Sequence[Outcome]]:
        self.begun.append([task.id[0] for task in tasks])
        self._ends.append(Future())
        return self._ends[-1]

    def _store_alone(self, calls: Sequence[shared.Alone]) -> Future[Sequence[Outcome]]:
        self.alone.append([call()[0] for call in calls])
        self._last.append(Future())
        return self._last[-1]

    def add(self, number: int, size: int = 0, key: str | None = None) -> asyncio.Future[bytes]:
        unique = None if key is None else UniqueKey(key, "running")
        task = NewTask(bytes([number]) * 16, "job", "default", bytes(size), unique=unique)
        return self.gathering.add(task, lambda: task.id)

    async def end(self, commit: int, outcomes: Sequence[Outcome] | None = None) -> None:
        self._ends[commit].set_result(outcomes or [bytes([number]) * 16 for number in self.begun[commit]])
        await turns()

    async def end_alone(self, commit: int, outcomes: Sequence[Outcome]) -> None:
        self._last[commit].set_result(outcomes)
        await turns()


async def turns(count: int = 5) -> None:
    """Let the event loop turn, without waiting."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_single_call_commits_at_once_and_later_calls_share_a_commit() -> None:
    async def main() -> None:
        commits = Commits()
        first = commits.add(1)
        await turns()
        assert commits.begun == [[1]]
        others = [commits.add(2), commits.add(3)]
        await turns()
        await commits.end(0)
        assert first.result() == bytes([1]) * 16
        assert commits.begun == [[1], [2, 3]]
        assert not any(other.done() for other in others)
        await commits.end(1)
        assert [other.result()[0] for other in others] == [2, 3]
        commits.add(4)
        await turns()
        assert commits.begun[2:] == [[4]]

    asyncio.run(main())


def test_simultaneous_calls_share_a_commit() -> None:
    async def main() -> None:
        commits = Commits()

        async def call(number: int) -> None:
            commits.add(number)

        await asyncio.gather(*(call(number) for number in range(9)))
        await turns()
        assert commits.begun == [list(range(9))]

    asyncio.run(main())


def test_no_call_waits_more_than_two_milliseconds_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def watched(when: float, call: Any, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            if getattr(call, "__self__", None) is commits.gathering:
                waits.append(when - loop.time())
            return call_at(when, call, *args, **kwargs)

        commits = Commits()
        monkeypatch.setattr(loop, "call_at", watched)
        for number in range(shared._MAX_COMMITS):
            commits.add(number)
            await turns()
            async with asyncio.timeout(30):
                while len(commits.begun) == number:
                    await asyncio.sleep(0)
        assert commits.begun == [[number] for number in range(shared._MAX_COMMITS)]
        commits.add(8)
        commits.add(9)
        await asyncio.sleep(10 * shared._MAX_WAIT)
        assert len(commits.begun) == shared._MAX_COMMITS  # no further commit, and so no further connection
        await commits.end(2)
        assert commits.begun[-1] == [8, 9]

    asyncio.run(main())
    assert len(waits) == shared._MAX_COMMITS
    assert max(waits) <= 0.002


def test_a_commit_is_bounded_in_tasks_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_TASKS", 3)
    monkeypatch.setattr(shared, "_MAX_BYTES", 100)

    async def main() -> None:
        commits = Commits()
        for number in range(5):
            commits.add(number)
        commits.add(5, size=100)
        commits.add(6)
        for commit in range(3):
            await turns()
            await commits.end(commit)
        assert commits.begun == [[0, 1, 2], [3, 4, 5], [6]]

    asyncio.run(main())


def test_cancelled_calls_are_not_sent_and_affect_no_other_calls() -> None:
    async def main() -> None:
        commits = Commits()
        first = commits.add(1)
        await turns()
        second, third = commits.add(2), commits.add(3)
        first.cancel()
        second.cancel()
        await commits.end(0)
        await commits.end(1)
        assert commits.begun == [[1], [3]]
        assert third.result()[0] == 3
        commits.add(4).cancel()
        await turns()
        commits.add(5)
        await turns()
        assert commits.begun[2:] == [[5]]

    asyncio.run(main())


def test_each_caller_receives_only_the_outcome_of_its_own_task() -> None:
    async def main() -> None:
        commits = Commits()
        calls = [commits.add(number, key="k" if number in (2, 4) else None) for number in range(5)]
        await turns()
        await commits.end(0, [bytes(16), ValueError("one"), None, bytes([3]) * 16, None])
        assert calls[0].result() == bytes(16)
        assert str(calls[1].exception()) == "one"
        assert calls[3].result()[0] == 3
        assert commits.alone == [[2, 4]]  # tasks with the same key, one after the other
        await commits.end_alone(0, [bytes([9]) * 16, KeyError("taken")])
        assert calls[2].result()[0] == 9
        assert isinstance(calls[4].exception(), KeyError)

    asyncio.run(main())


def test_a_commit_may_end_after_its_event_loop() -> None:
    kept: list[Commits] = []

    async def main() -> None:
        kept.append(Commits())
        kept[0].add(1)
        await turns()

    asyncio.run(main())
    with contextlib.suppress(RuntimeError):
        kept[0]._ends[0].set_result([bytes(16)])


def test_a_failed_commit_raises_in_every_caller() -> None:
    async def main() -> None:
        commits = Commits()
        calls = [commits.add(1), commits.add(2)]
        await turns()
        commits._ends[0].set_exception(MemoryError("no room"))
        await turns()
        assert "no room" in str(calls[0].exception())
        assert "no room" in str(calls[1].exception())

    asyncio.run(main())


def test_an_unavailable_thread_raises_in_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        commits = Commits()

        def refuse(_: object) -> Future[Sequence[Outcome]]:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

        commits.gathering._store = refuse
        calls = [commits.add(1), commits.add(2)]
        with pytest.raises(RuntimeError, match="after interpreter shutdown"):
            await calls[0]
        assert str(calls[1].exception()) == str(calls[0].exception())
        assert calls[1].exception() is not calls[0].exception()

    asyncio.run(main())
