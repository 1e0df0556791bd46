"""A deterministic asyncio event loop for workflow code.

The loop never blocks. Callbacks run first in, first out until none is left. Time stands still meanwhile, and moves only
with the history. `call_later`, and with it `asyncio.sleep`, `wait_for` and `timeout`, starts a durable timer. Tasks and
futures hash by their order of creation. Sets of them, such as those that `asyncio.wait` returns, therefore have the
same order in every process. `keep_order` does the same for futures and sets that asyncio itself creates.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import tasks
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextvars import Context
from itertools import islice
from typing import Any, NoReturn, Protocol, TypeVar

from orchestrator.errors import InvalidWorkflow, NotDeterministic, OrchestratorError
from orchestrator.sdk.code.endings import UNSTOPPABLE, EndTurn, Evicted
from orchestrator.sdk.inside import running

T = TypeVar("T")
MAX_WAIT = 100 * 365 * 86_400.0
"""The maximum delay of a timer in seconds: a hundred years."""
_MAX_IDLE_CALLBACKS = 100_000
"""Callbacks without a new task or future after which the code counts as an endless loop."""


class Timers(Protocol):
    """The commander's side of the loop, which keeps its timers."""

    def start_timer(self, timer: Timer, seconds: float, name: str) -> None:
        """Fire `timer` after this many seconds."""

    def cancel_timer(self, timer: Timer) -> None:
        """Cancel a timer, which may already have fired."""

    def check_unseen(self, action: str) -> None:
        """Raise InvalidWorkflow during a query or validator."""

    def stop(self, error: OrchestratorError) -> None:
        """Stop the code: it has done something that replay cannot repeat."""

    def report(self, message: str, error: BaseException | None) -> None:
        """Log an error that the code did not handle."""


class OrderedFuture(asyncio.Future[T]):
    """A future that hashes by its order of creation."""

    def __init__(self, *, loop: Loop) -> None:
        self._order = loop.next_order()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._order


class OrderedTask(asyncio.Task[T]):
    """A task that hashes by its order of creation."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: Loop, **options: Any) -> None:
        self._order = loop.next_order()  # first, because registering a task hashes it
        if options.get("name") is None:
            options["name"] = f"Task-{self._order}"  # asyncio numbers the tasks of the whole process
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._order


class Timer(asyncio.TimerHandle):
    """A callback that runs when a durable timer fires."""

    __slots__ = ("id",)

    id: bytes


class Loop(asyncio.AbstractEventLoop):
    """The event loop of one run."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._ready: deque[asyncio.Handle] = deque()
        self._created = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._generators: list[Any] = []
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        """The conditions of waiting tasks, in the order in which the tasks began to wait."""
        self._now = 0.0
        self._closed = False
        self.sealed = False
        """Whether a query or validator runs, which may start nothing."""

    # -- used by the workflow

    def run_until_idle(self, now: float, stop: Callable[[], bool]) -> None:
        """Run all ready callbacks, and those that become ready, at this time. Return early if `stop` returns true."""
        self._now = max(self._now, now)
        ready, created, idle = self._ready, self._created, 0
        while (ready or (self._conditions and not stop() and self._meet_condition())) and not stop():
            handle = ready.popleft()
            if not handle.cancelled():
                # The task that raised it has it as its exception.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    handle._run()
            idle = idle + 1 if self._created == created else 0
            created = self._created
            if idle > _MAX_IDLE_CALLBACKS + 10 * len(self._tasks):
                raise NotDeterministic(
                    f"The code ran {idle:,} callbacks without beginning to wait for anything new. A loop around "
                    "`asyncio.sleep(0)` never ends here, because time does not advance; wait for a task, a timer "
                    "or a signal."
                )

    async def wait_until(self, check: Callable[[], bool]) -> None:
        """Wait until `check` is true at a moment when nothing else can run, also the first time."""
        is_met = False
        while not is_met:
            future = self.create_future()
            self._conditions[future] = check
            try:
                await future
            finally:
                del self._conditions[future]
            is_met = check()  # if the check raises, it does so here

    def _meet_condition(self) -> bool:
        """Wake the first task whose condition is met. Only one, so that its condition still holds when it resumes."""
        for future, check in self._conditions.items():
            try:
                if not check():
                    continue
            except (Evicted, EndTurn):
                raise
            except BaseException:  # noqa: BLE001  # re-raised in the task itself
                pass
            future.set_result(None)
            return True
        return False

    def next_order(self) -> int:
        """Return the next number in the order of creation of tasks and futures."""
        if self.sealed:
            self._timers.check_unseen("a new task or future")
        self._created += 1
        return self._created

    def fire(self, timer: Timer) -> None:
        """Queue a timer's callback."""
        self._ready.append(timer)

    def keep_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Keep an asynchronous generator alive, so that the time of its garbage collection does not matter."""
        if len(self._generators) % 100 == 99:
            self._generators = [item for item in self._generators if item.ag_frame is not None]
        self._generators.append(generator)

    async def close_generators(self) -> None:
        """Close the unfinished asynchronous generators, oldest first. Log those that fail."""
        while self._generators:
            generator = self._generators.pop(0)
            if generator.ag_frame is None or generator.ag_running:  # it has ended, or a waiting task uses it
                continue
            try:
                await generator.aclose()
            except UNSTOPPABLE:
                raise
            except BaseException as error:  # noqa: BLE001  # only the outcome of the function counts
                self._timers.report(f"closing {generator!r} failed", error)

    @property
    def suspended(self) -> tuple[list[Any], list[Any]]:
        """The waiting coroutines and asynchronous generators, in order of creation."""
        return [task.get_coro() for task in self._tasks], self._generators

    def first_suspended(self, most: int) -> list[Any]:
        """Return the coroutines of the first `most` waiting tasks, beginning with the workflow's function."""
        return [task.get_coro() for task in islice(self._tasks, most)]

    @property
    def open_tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended, in order of creation."""
        return [task for task in self._tasks if not task.done()]

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # evicted on purpose

    # -- the interface of an asyncio event loop

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        if self.sealed:
            self._timers.check_unseen("calling something soon")
        if not self._closed:
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None, name: str = ""
    ) -> Any:
        if not delay <= MAX_WAIT:
            raise InvalidWorkflow(f"A timer waits a hundred years at most; found {delay!r} seconds.")
        if self.sealed:
            self._timers.check_unseen("a new timer")
        delay = round(delay, 6)  # rounds off floating-point noise
        timer = Timer(self._now + max(delay, 0.0), callback, args, self, context)
        timer.id = b""
        if delay > 0:
            self._timers.start_timer(timer, delay, name)
        else:
            self._ready.append(timer)
        return timer

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return self.call_later(when - self._now, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: Timer) -> None:
        self._timers.cancel_timer(handle)

    def create_future(self) -> asyncio.Future[Any]:
        return OrderedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if asyncio.isfuture(coro):  # a scheduled task or child: asyncio tasks may wait for it
            coro = _wait_for(coro)
        if self._closed:
            coro.close()
            raise Evicted
        if self.sealed:
            coro.close()
            self._timers.check_unseen("a new task")
        task: OrderedTask[Any] = OrderedTask(coro, self, **options)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            self._timers.report(context["message"], context.get("exception"))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False  # an evicted coroutine may still ask

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]  # noqa: ARG002
        self._refuse(
            f"A workflow has no threads: {function!r} cannot run in one. Make it a task and schedule that, or "
            "record its result with ctx.run(name, function)."
        )

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **_: Any) -> NoReturn:  # type: ignore[override]  # noqa: ARG002
        self._refuse("A workflow cannot be accessed from another thread. Send it a signal instead.")

    def _refuse(self, message: str) -> NoReturn:
        """Refuse a call and stop the code, even if the code catches the error."""
        error = NotDeterministic(message)
        if running.commander is self._timers:
            self._timers.stop(error)
        raise error


async def _wait_for(future: asyncio.Future[T]) -> T:
    return await future


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(loop: Loop, *_: Any, **__: Any) -> NoReturn:
        loop._refuse(
            f"A workflow does no input or output of its own, so its event loop has no {name}. Make it a task and "
            "schedule that, or record the result of a short call with ctx.run(name, function)."
        )

    return refuse


for _name in (
    *("create_connection", "create_server", "create_unix_connection", "create_unix_server", "create_datagram_endpoint"),
    *("connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell", "start_tls", "sendfile"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_sendall", "sock_sendto", "sock_connect", "sock_accept"),
    *("add_reader", "add_writer", "getaddrinfo", "getnameinfo", "add_signal_handler", "sock_sendfile"),
    *("run_forever", "run_until_complete", "set_default_executor", "connect_accepted_socket", "set_task_factory"),
):
    setattr(Loop, _name, _refuse(_name))


_as_completed = asyncio.as_completed
_wait = asyncio.wait
_all_tasks = asyncio.all_tasks
_BY_ADDRESS = asyncio.Future.__hash__


class OrderedGathering(tasks._GatheringFuture):  # type: ignore[name-defined, misc]
    """The future of `asyncio.gather`. In a workflow it hashes by its order of creation."""

    def __init__(self, children: Any, *, loop: asyncio.AbstractEventLoop) -> None:
        self._order = loop.next_order() if isinstance(loop, Loop) else None
        super().__init__(children, loop=loop)

    def __hash__(self) -> int:
        return _BY_ADDRESS(self) if self._order is None else self._order


def _running() -> Loop | None:
    loop = asyncio._get_running_loop()
    return loop if isinstance(loop, Loop) else None


def _ordered_as_completed(fs: Any, **options: Any) -> Any:
    """Like `asyncio.as_completed`, but in a workflow it starts coroutines in the given order."""
    if _running() is not None:
        fs = _in_order(asyncio.ensure_future(item) for item in fs)
    return _as_completed(fs, **options)


async def _ordered_wait(fs: Any, **options: Any) -> Any:
    """Like `asyncio.wait`, but in a workflow it refuses futures without an order."""
    if _running() is not None and not asyncio.isfuture(fs) and not asyncio.iscoroutine(fs):
        fs = _in_order(fs)
    return await _wait(fs, **options)


def _in_order(futures: Iterable[Any]) -> list[Any]:
    items = list(futures)
    for future in items:
        if asyncio.isfuture(future) and type(future).__hash__ is _BY_ADDRESS:
            raise NotDeterministic(
                f"{type(future).__name__}() was created directly, and a set of such objects has a different "
                "order in every process. Inside a workflow, use asyncio.get_running_loop().create_future(), or "
                "asyncio.create_task(…)."
            )
    return items


def _ordered_all_tasks(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
    """Like `asyncio.all_tasks`, but adds a workflow's tasks to the set in their order of creation."""
    workflow_loop = _running() if loop is None else loop
    return set(workflow_loop.open_tasks) if isinstance(workflow_loop, Loop) else _all_tasks(loop)


def keep_order() -> None:
    """Patch asyncio to keep a defined order inside workflows."""
    asyncio.as_completed = tasks.as_completed = _ordered_as_completed
    asyncio.wait = tasks.wait = _ordered_wait
    asyncio.all_tasks = tasks.all_tasks = _ordered_all_tasks
    tasks._GatheringFuture = OrderedGathering  # type: ignore[attr-defined]
