"""Test workflows in memory, with mocked tasks and a clock that can be advanced."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, TypeVar

from orchestrator.domain.code import commands, history
from orchestrator.domain.ids import derived_id
from orchestrator.domain.runs import Nesting
from orchestrator.domain.tasks.task import NewTask, TaskError
from orchestrator.errors import InvalidTask
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.handle import W_co
from orchestrator.sdk.code.workflow import CodeWorkflow, Registry
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call, encode_value
from orchestrator.settings import Settings
from orchestrator.testing.leader import MemoryLeader
from orchestrator.testing.memory_run import Run, fact_for_parent
from orchestrator.testing.runs import TestedRun

R = TypeVar("R")


class WorkflowTest:
    """Runs workflows in memory: without database, Redis, worker and waiting.

    async with WorkflowTest() as test:
        receipt = await test.run(order, "o-1", mocks={charge_card: "charge-7", ship: fake_ship})
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._workflow: CodeWorkflow[..., Any] | None = None
        self._engine = Engine(self._find, Settings.max_payload)
        self.leader = MemoryLeader(self._engine, self._find, start.timestamp())
        self._mocks = MockBook()
        self._mocked: set[bytes] = set()
        self._calls: dict[asyncio.Future[None], None] = {}
        self._count = 0

    async def __aenter__(self) -> WorkflowTest:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._engine.close()

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.leader.now, UTC)

    async def run(self, workflow: CodeWorkflow[..., R], *args: Any, mocks: Mocks | None = None, **kwargs: Any) -> R:
        """Run a workflow to its end and return its result. Timers fire as soon as nothing else is left to do.

        At the end the history is replayed, to detect code that is not deterministic.
        """
        run = await self.start(workflow, *args, mocks=mocks, **kwargs)
        return await run.result()

    async def start(
        self, workflow: CodeWorkflow[..., R, W_co], *args: Any, mocks: Mocks | None = None, **kwargs: Any
    ) -> TestedRun[R, W_co]:
        """Start a workflow and run it until it waits for a timer or an external event."""
        self._workflow = workflow
        settings = workflow._client.settings
        self._engine.limit, self._engine.largest = settings.max_payload, settings.largest_value
        self.leader.grace = settings.run_timeout_grace
        self.leader.nesting = Nesting(settings.max_depth, settings.max_descendants)
        self._mocks.add(mocks or {}, workflow._registry)
        self._count += 1
        payload = workflow._encode_call(args, kwargs)
        queue = workflow._code_options.queue or "default"
        started = history.RunStarted(workflow.name, workflow.version, payload, queue)
        timeout = workflow._code_options.seconds or None
        run = self.leader.start(started, derived_id(bytes(16), "test", self._count), timeout=timeout)
        await self.settle()
        return TestedRun(self, workflow, run)

    async def skip(self, seconds: float = 0.0, **parts: float) -> None:
        """Advance the clock, `skip(60)` or `skip(hours=24)`, and process everything that becomes due."""
        until = self.leader.now + seconds + timedelta(**parts).total_seconds()
        await self.settle()
        while (due := self.leader.next_due()) is not None and due <= until:
            await self.skip_to_next()
        self.leader.now = until

    async def skip_to_next(self) -> bool:
        """Fire the next timer and process its consequences. Return False if there is none."""
        fired = self.leader.fire_next()
        await self.settle()
        return fired

    async def settle(self) -> None:
        """Process everything that can happen without time passing."""
        while True:
            run = next((run for run in self.leader.runs.values() if run.has_unseen_facts and run.stuck is None), None)
            if run is not None:
                await self._show(run)
            elif self._calls:
                await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
                for call in [call for call in self._calls if call.done()]:
                    del self._calls[call]
                    call.result()
            else:
                return

    async def _show(self, run: Run) -> None:
        """Show new events to a run's code, or call its mock; then call the mocks of its tasks."""
        if run.parent is not None and run.started.workflow in self._mocks:
            self._show_mock(run, run.parent)
            return
        await asyncio.to_thread(self.leader.activate, run)  # event loops cannot be nested
        for task in [task for task in run.tasks.values() if task.id not in self._mocked]:
            self._mocked.add(task.id)
            self._calls[asyncio.ensure_future(self._mock_task(run, task))] = None

    async def _mock_task(self, run: Run, task: NewTask) -> None:
        assert self._workflow is not None
        registered = self._workflow._registry.tasks.get(task.name)
        outcome = await self._mocks.call(
            task.name, task.payload, registered._signature if registered else None, self._engine.limit
        )
        fact = (
            history.TaskFailed(task.id, outcome)
            if isinstance(outcome, TaskError)
            else history.TaskCompleted(task.id, outcome)
        )
        seconds = self._mocks.seconds(task.name)
        if seconds:
            self.leader.plan(run, task.id, seconds, fact)
        else:
            self.leader.settle(run, task.id, fact)

    def _show_mock(self, run: Run, parent: Run) -> None:
        """Run the mock of a child run. A cancel request cancels the child."""
        run.shown = len(run.history)
        if isinstance(run.history[-1].what, history.RunCancelRequested):
            self.leader.end(run, commands.CancelRun())
        elif run.id not in self._mocked:
            self._mocked.add(run.id)
            self._calls[asyncio.ensure_future(self._mock_child(run, parent))] = None

    async def _mock_child(self, run: Run, parent: Run) -> None:
        workflow = self._find(run.started.workflow, None)
        outcome = await self._mocks.call(workflow.name, run.started.payload, workflow._signature, self._engine.limit)
        seconds = self._mocks.seconds(workflow.name)
        end = commands.FailRun(outcome) if isinstance(outcome, TaskError) else commands.CompleteRun(outcome)
        if seconds:
            self.leader.plan(parent, run.id, seconds, fact_for_parent(run.id, end))
        elif run.end is None:
            self.leader.end(run, end)

    def _find(self, name: str, version: int | None) -> CodeWorkflow[..., Any]:
        assert self._workflow is not None
        return self._workflow._registry.workflows.find(name, version)


Mocks = Mapping[Task[..., Any] | CodeWorkflow[..., Any] | str, Any]
"""Mocks by task, child workflow or name: a value, an exception, a function with the same arguments, or `After`."""


@dataclass(frozen=True)
class After:
    """A mock that takes some time, by the test's clock. `After(math.inf)` never ends."""

    seconds: float
    mock: Any = None


class MockBook:
    """The mocks of a test."""

    def __init__(self) -> None:
        self._mocks: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._mocks

    def add(self, mocks: Mocks, registry: Registry) -> None:
        """Add mocks. Raise for a name that is neither a task nor a workflow, because its mock would never be called."""
        for key, mock in mocks.items():
            if isinstance(key, str):
                registry.find(key)
            elif not isinstance(key, (Task, CodeWorkflow)):
                raise InvalidTask(f"mocks: expected tasks, workflows or their names, found {key!r:.200}.")
            self._mocks[key if isinstance(key, str) else key.name] = mock

    def seconds(self, name: str) -> float:
        mock = self._mocks.get(name)
        return mock.seconds if isinstance(mock, After) else 0.0

    async def call(self, name: str, payload: bytes, signature: Signature | None, limit: int) -> bytes | TaskError:
        """Call a mock as a worker would call the original: with typed arguments, and return the encoded result."""
        try:
            if name not in self._mocks:
                raise InvalidTask(
                    f"Task {name!r} has no mock, and a test runs no real tasks. Give it one: mocks={{{name}: …}}."
                )
            mock = self._mocks[name]
            mock = mock.mock if isinstance(mock, After) else mock
            arguments, keywords = decode_call(payload)
            if signature is not None:
                arguments, keywords = signature.restore(arguments, keywords)
            if isinstance(mock, BaseException) or (isinstance(mock, type) and issubclass(mock, BaseException)):
                raise mock
            value = mock(*arguments, **keywords) if callable(mock) else mock
            if inspect.isawaitable(value):
                value = await value
            return encode_value(value, f"The result of the mock of {name!r}", limit)
        except Exception as error:  # noqa: BLE001  # a mock that raises is a failed task
            return describe(error)
