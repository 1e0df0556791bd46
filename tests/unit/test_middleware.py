"""Middleware: what its hooks see and may change, and in which order. Without middleware, hooks cost nothing."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import orchestrator
from orchestrator import (
    AttemptEnd,
    ConfigurationError,
    EnqueueCall,
    InvalidTask,
    Middleware,
    Orchestrator,
    Task,
    TaskContext,
    TurnContext,
    UnknownOption,
    WorkflowContext,
)
from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.executors.record import ExecutorCall, Record
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import (
    Dispatch,
    Failed,
    Lost,
    NewTask,
    Returned,
    Succeeded,
    TaskError,
    TaskOptions,
    parse_options,
)
from orchestrator.errors import RetryLater, TaskAborted
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.sdk.values.payload import encode_call
from orchestrator.transport.codec import encode
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.hooks import attempt_end
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.outbox import ClosedOutbox, KeptOutbox

TASK = b"t" * 16
tenant: ContextVar[Any] = ContextVar("tenant")


class Stored:
    """A backend that keeps enqueued tasks."""

    def __init__(self) -> None:
        self.tasks = self
        self.new: list[NewTask] = []
        self.fails = False

    def enqueue(self, task: NewTask) -> bytes:
        if self.fails:
            raise OSError("away")
        self.new.append(task)
        return task.id

    async def aenqueue(self, task: NewTask) -> bytes:
        return self.enqueue(task)

    def enqueue_many(self, tasks: list[NewTask]) -> list[bytes]:
        return [self.enqueue(task) for task in tasks]

    @property
    def headers(self) -> list[dict[str, str]]:
        return [parse_options(task.options).headers for task in self.new]


class RecordingMiddleware(Middleware):
    """Records its calls in one list, under its name."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    def enqueue(self, call: EnqueueCall) -> Iterator[None]:
        call.headers[self.name] = "set"
        yield from self.around(f"enqueue {call.name}", lambda: call.id is not None)

    def execute(self, ctx: TaskContext) -> Iterator[None]:
        yield from self.around(f"execute {ctx.task_name}", lambda: True)

    def around(self, what: str, is_done: Callable[[], bool]) -> Iterator[None]:
        self.seen.append(f"{self.name} before {what}")
        try:
            yield
        except BaseException as error:
            self.seen.append(f"{self.name} {type(error).__name__}")
            raise
        assert is_done()
        self.seen.append(f"{self.name} after")

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        self.seen.append(f"{self.name} {ctx.task_name} {end.outcome}")


def application(*middleware: Middleware, **given: Any) -> tuple[Orchestrator, Stored]:
    app, stored = Orchestrator(middleware=middleware, **given), Stored()
    app._client._backend = stored  # type: ignore[assignment]

    @app.task(name="plain")
    def plain(word: str = "") -> Any:
        if word == "fail":
            raise ValueError(word)
        return tenant.get(None)

    @app.task(name="later")
    async def later(word: str = "") -> str | None:
        if word == "fail":
            raise ValueError(word)
        return tenant.get(None)

    return app, stored


def new_job(name: str, *args: Any, options: str | None = None, **fields: Any) -> Job:
    dispatch = Dispatch(TASK, 1, name, encode_call(name, args, {}, 1_000), "default", options, **fields)
    job = Job(dispatch, Bundle("g", "default", "1-0", 1), 0, 0.0)
    assert job.begin(100.0)
    return job


def runner_of(app: Orchestrator) -> Runner:
    return Runner(app, ClosedOutbox(), Allowed(app, []))


def run(app: Orchestrator, name: str, *args: Any, options: str | None = None) -> AttemptReport:
    runner, job = runner_of(app), new_job(name, *args, options=options)
    return asyncio.run(runner.run_async(job)) if app.tasks[name]._is_async else runner.run(job)


# -- enqueue hooks


def test_enqueue_hooks_wrap_a_call_in_order() -> None:
    seen: list[str] = []
    app, stored = application(RecordingMiddleware("outer", seen))
    app.middleware.add(RecordingMiddleware("inner", seen))
    app.enqueue("plain")
    assert seen == ["outer before enqueue plain", "inner before enqueue plain", "inner after", "outer after"]
    assert stored.headers == [{"outer": "set", "inner": "set"}]


@pytest.mark.parametrize("kind", ["enqueue", "aenqueue"])
def test_an_error_of_an_enqueue_reaches_the_hooks_and_the_caller(kind: str) -> None:
    seen: list[str] = []
    app, stored = application(RecordingMiddleware("one", seen))
    stored.fails = True
    with pytest.raises(OSError, match="away"):
        _ = app.enqueue("plain") if kind == "enqueue" else asyncio.run(app.aenqueue("plain"))
    assert seen == ["one before enqueue plain", "one OSError"]


def test_a_hook_rejects_a_call() -> None:
    class Refusing(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            if call.args == ("bad",) or call.kwargs == {"word": "bad"}:
                raise PermissionError(call.name)

    app, stored = application(Refusing())
    plain: Task[..., Any] = app.tasks["plain"]
    plain.enqueue("good")
    for refused in (lambda: plain.enqueue("bad"), lambda: app.enqueue_many(plain, [("good",), {"word": "bad"}])):
        with pytest.raises(PermissionError, match="plain"):
            refused()
    assert len(stored.new) == 1


def test_a_hook_changes_options() -> None:
    class Urgent(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            assert call.options == {"retries": 2}
            call.options["priority"] = 7

    app, stored = application(Urgent())
    app.tasks["plain"].options(retries=2).enqueue()
    assert stored.new[0].priority == 7
    assert parse_options(stored.new[0].options).retry.max == 2
    assert parse_options(app.tasks["plain"]._place((), {}).options).retry.max == 0, "the task itself stays as it is"


def test_an_unknown_option_set_by_a_hook_is_rejected() -> None:
    class Wrong(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            call.options["prority"] = 7

    app, _ = application(Wrong())
    with pytest.raises(UnknownOption, match="priority"):
        app.enqueue("plain")


def test_hooks_run_for_each_call_of_a_bulk_enqueue() -> None:
    seen: list[str] = []

    class Numbering(Middleware):
        def enqueue(self, call: EnqueueCall) -> Iterator[None]:
            call.headers["word"] = call.args[0]
            yield
            seen.append(call.args[0])

    app, stored = application(Numbering())
    handles = app.enqueue_many(app.tasks["plain"], [("a",), ("b",), ("c",)])
    assert len(handles) == 3
    assert stored.headers == [{"word": "a"}, {"word": "b"}, {"word": "c"}]
    assert seen == ["c", "b", "a"]


def test_an_exception_swallowed_by_a_hook_is_still_raised() -> None:
    class Swallowing(Middleware):
        def enqueue(self, call: EnqueueCall) -> Iterator[None]:
            del call
            with suppress(PermissionError):
                yield

        def execute(self, ctx: TaskContext) -> Iterator[None]:
            del ctx
            with suppress(ValueError):
                yield

    class Refusing(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            raise PermissionError(call.name)

    app, stored = application(Swallowing(), Refusing())
    for call in (
        lambda: app.enqueue("plain"),
        lambda: asyncio.run(app.aenqueue("plain")),
        lambda: app.enqueue_many(app.tasks["plain"], [()]),
    ):
        with pytest.raises(PermissionError, match="plain"):
            call()
    assert stored.new == []
    for name in ("plain", "later"):
        assert isinstance(run(app, name, "fail"), Failed)


def test_children_inherit_headers_without_any_middleware() -> None:
    app, _ = application()
    outbox, job = KeptOutbox(), new_job("plain", options='{"headers": {"a": "1", "b": "1"}}')
    runtime = JobRuntime(job, outbox)
    enter_task(runtime)
    try:
        app.tasks["plain"].options(headers={"b": "2"}).enqueue()
        app.start_many(app.tasks["plain"], [()])
        app.tasks["plain"].options(on_success=True).enqueue()
        with pytest.raises(InvalidTask, match=r"4,1\d\d bytes as JSON; at most 4,096 are allowed"):
            app.tasks["plain"].options(headers={"c": "x" * 4_080}).enqueue()
    finally:
        enter_task(None)
    found = [parse_options(task.options).headers for task in (*outbox.tasks, *job.children)]
    assert found == [{"a": "1", "b": "2"}, {"a": "1", "b": "1"}, {"a": "1", "b": "1"}]


def test_an_async_hook_is_awaited_by_async_calls() -> None:
    seen: list[str] = []

    class Both(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            seen.append(f"enqueue {call.name}")

        async def aenqueue(self, call: EnqueueCall) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            seen.append("aenqueue")
            yield
            assert call.id is not None
            seen.append("after")

    app, _ = application(Both())
    app.enqueue("plain")
    asyncio.run(app.aenqueue("plain"))
    assert seen == ["enqueue plain", "aenqueue", "after"]


def test_headers_can_be_set_as_an_option() -> None:
    app, stored = application()
    app.tasks["plain"].options(headers={"tenant": "acme"}).enqueue()
    assert stored.headers == [{"tenant": "acme"}]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"a": "x" * 5_000}, "5,008 bytes as JSON; at most 4,096 are allowed. The largest is 'a'"),
        ({"a": 7}, "expected a string as value, found 7 under 'a'"),
        ({"a": "\0"}, "strings that UTF-8 and Postgres can store"),
        ({"": "a"}, "a header needs a name"),
        ({"a": "\ud800"}, "strings that UTF-8 and Postgres can store"),
        ("abc", "expected a mapping of names to strings"),
    ],
)
def test_invalid_headers_are_rejected(headers: Any, words: str) -> None:
    app, stored = application()
    with pytest.raises(InvalidTask, match=words):
        app.tasks["plain"].options(headers=headers)

    class Adding(Middleware):
        def enqueue(self, call: EnqueueCall) -> None:
            call.headers = headers

    app.middleware.add(Adding())
    with pytest.raises(InvalidTask, match=words):
        app.enqueue("plain")
    assert stored.new == []


# -- hooks of attempts


@pytest.mark.parametrize("name", ["plain", "later"])
def test_hooks_wrap_an_attempt_in_order(name: str) -> None:
    seen: list[str] = []
    app, _ = application(RecordingMiddleware("outer", seen), RecordingMiddleware("inner", seen))
    assert isinstance(run(app, name), Succeeded)
    assert seen == [f"outer before execute {name}", f"inner before execute {name}", "inner after", "outer after"]
    seen.clear()
    assert isinstance(run(app, name, "fail"), Failed)
    assert seen[2:] == ["inner ValueError", "outer ValueError"]


@pytest.mark.parametrize("name", ["plain", "later"])
def test_exceptions_of_hooks_decide_the_outcome_of_an_attempt(name: str) -> None:
    class Later(Middleware):
        def execute(self, ctx: TaskContext) -> Iterator[None]:
            try:
                yield
            except ValueError:
                raise RetryLater(5 * ctx.attempt) from None

    class Refusing(Middleware):
        def execute(self, ctx: TaskContext) -> None:
            raise PermissionError(ctx.headers["tenant"])

    app, _ = application(Later())
    report = run(app, name, "fail")
    assert isinstance(report, Failed)
    assert (report.delay, report.charged) == (5, False)
    app, _ = application(Refusing())
    report = run(app, name, options='{"headers": {"tenant": "acme"}}')
    assert isinstance(report, Failed)
    assert (report.error.kind, report.error.message) == ("PermissionError", "acme")


def test_an_async_hook_wraps_an_async_task() -> None:
    seen: list[str] = []

    class Both(Middleware):
        def execute(self, ctx: TaskContext) -> None:
            seen.append(f"execute {ctx.task_name}")

        async def aexecute(self, ctx: TaskContext) -> AsyncIterator[None]:
            seen.append(f"aexecute {ctx.task_name}")
            yield
            await asyncio.sleep(0)
            seen.append("after")

    app, _ = application(Both())
    run(app, "plain")
    run(app, "later")
    assert seen == ["execute plain", "aexecute later", "after"]


@pytest.mark.parametrize("name", ["plain", "later"])
def test_a_context_variable_of_a_hook_does_not_reach_the_next_task(name: str) -> None:
    class Setting(Middleware):
        def execute(self, ctx: TaskContext) -> None:
            if "tenant" in ctx.headers:
                tenant.set(ctx.headers["tenant"])

    app, _ = application(Setting())
    first, second = run(app, name, options='{"headers": {"tenant": "acme"}}'), run(app, name)
    assert isinstance(first, Succeeded)
    assert isinstance(second, Succeeded)
    assert (first.result, second.result) == (b"\xa4acme", b"\xc0")


def test_the_context_shows_headers_failures_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = application()
    found: list[TaskContext] = []

    @app.task(name="asks")
    def asks(ctx: TaskContext) -> None:
        found.append(ctx)

    runner_of(app).run(new_job("asks", options='{"headers": {"a": "b"}}', failures=2, alone=True))
    assert (found[0].headers, found[0].failures, found[0].is_after_loss) == ({"a": "b"}, 2, True)


# -- workflow turns


def turn_of(app: Orchestrator) -> tuple[Runner, Job]:
    """Return a runner, and the job of a workflow's first turn."""

    @app.workflow(name="flow")
    async def flow(ctx: WorkflowContext) -> str:
        return tenant.get()

    started = history.RunStarted("flow", 1, b"\x92\x90\x80")
    activation = Activation(TASK, "flow", 1, 0, 1, [history.Event(1, 0.0, started)])
    dispatch = Dispatch(TASK, 1, "flow", encode(activation), "default", '{"headers": {"tenant": "acme"}}', run_id=TASK)
    job = Job(dispatch, Bundle("g", "default", "1-0", 1), 0, 0.0)
    assert job.begin(100.0)
    return runner_of(app), job


def test_a_turn_hook_sets_context_variables_and_cannot_fail_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[TurnContext] = []

    class Setting(Middleware):
        def turn(self, ctx: TurnContext) -> Iterator[None]:
            tenant.set(ctx.headers["tenant"])
            yield
            seen.append(ctx)
            raise ValueError("too late")

    app, _ = application(Setting())
    runner, job = turn_of(app)
    report = runner.run(job)
    assert isinstance(report, Activated)
    assert b"acme" in encode(report)
    assert [(turn.workflow, turn.run_id.bytes, turn.is_replay) for turn in seen] == [("flow", TASK, False)]
    assert "middleware.failed hook=turn: the turn remains valid" in caplog.text
    assert tenant.get(None) is None


@pytest.mark.parametrize(("error", "charged"), [(ValueError("no"), True), (RetryLater(5), False)])
def test_an_exception_before_a_turn_prevents_the_turn(error: Exception, charged: bool) -> None:
    class Failing(Middleware):
        def turn(self, ctx: TurnContext) -> None:
            assert ctx.workflow == "flow"
            raise error

    app, _ = application(Failing())
    runner, job = turn_of(app)
    report = runner.run(job)
    assert isinstance(report, Failed)
    assert report.charged is charged


# -- outcomes of attempts


ERROR = TaskError("ValueError", "no")


@pytest.mark.parametrize(
    ("report", "options", "outcome"),
    [
        (Succeeded(TASK, 1, 2.5, b"\xc0"), None, "success"),
        (Failed(TASK, 1, 2.5, ERROR), None, "failure"),
        (Failed(TASK, 1, 2.5, ERROR), '{"retry": {"max": 1}}', "retry"),
        (Failed(TASK, 1, 2.5, ERROR, retryable=False), '{"retry": {"max": 1}}', "failure"),
        (Failed(TASK, 1, 2.5, ERROR, charged=False), None, "retry"),
        (Lost(TASK, 1, True, "exit code 3"), None, "lost"),
        (Returned(TASK, 1, "no free slot"), None, None),
    ],
)
def test_an_attempt_has_the_outcome_of_its_report(
    report: AttemptReport, options: str | None, outcome: str | None
) -> None:
    end = attempt_end(new_job("plain", options=options), report)
    assert (end and end.outcome) == outcome
    if end is not None and outcome != "lost":
        assert end.seconds == 2.5


def test_a_cancelled_attempt_has_neither_failed_nor_succeeded() -> None:
    job = new_job("plain")
    job.stop_with(TaskAborted, 101.0)
    for report in (Failed(TASK, 1, 2.5, ERROR), Succeeded(TASK, 1, 2.5, b"\xc0")):
        end = attempt_end(job, report)
        assert end is not None
        assert end.outcome == "cancelled"
    job.completion = b"\xc0"  # completed in its own transaction
    end = attempt_end(job, report)
    assert end is not None
    assert end.outcome == "success"


def test_the_end_of_a_cancelled_execution_is_not_an_attempt() -> None:
    call = ExecutorCall("process", {"command": ["true"]}, ends=Record(name="x", attempt=1, failures=0, since=0.0))
    options = msgspec.json.encode(TaskOptions(executor=call)).decode()
    assert attempt_end(new_job("process", options=options), Succeeded(TASK, 1, 2.5, b"\xc0")) is None


def test_a_failing_end_hook_does_not_stop_the_other_hooks(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Middleware):
        def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
            raise ValueError(ctx, end)

    seen: list[str] = []
    app, _ = application(Failing(), RecordingMiddleware("next", seen))
    runner_of(app).ended(new_job("plain"), Succeeded(TASK, 1, 2.5, b"\xc0"))
    assert seen == ["next plain success"]
    assert "middleware.failed hook=" in caplog.text


# -- context variables


def test_context_variables_travel_with_tasks() -> None:
    app, stored = application(context=[tenant])
    app.enqueue("plain")
    token = tenant.set({"name": "acme", "plan": [1, 2.5, None]})
    try:
        app.enqueue("plain")
    finally:
        tenant.reset(token)
    assert stored.headers == [{}, {"context.tenant": '{"name":"acme","plan":[1,2.5,null]}'}]
    report = run(app, "plain", options=stored.new[1].options)
    assert isinstance(report, Succeeded)
    assert b"acme" in report.result


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object()])
def test_context_variables_must_hold_json(value: Any) -> None:
    app, _ = application(context=[tenant])
    token = tenant.set(value)
    try:
        with pytest.raises(InvalidTask, match="Context variable 'tenant': expected JSON data, found"):
            app.enqueue("plain")
        tenant.set("x" * 5_000)
        with pytest.raises(InvalidTask, match=r"The largest is 'context\.tenant'"):
            app.enqueue("plain")
    finally:
        tenant.reset(token)


# -- invalid middleware


class OnlyAsync(Middleware):
    async def aexecute(self, ctx: TaskContext) -> None:
        pass


class Awaiting(Middleware):
    async def enqueue(self, call: EnqueueCall) -> None:
        pass


class Misspelt(Middleware):
    def exceute(self, ctx: TaskContext) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"middleware": None}, r"middleware=…\): expected a list, found None"),
        ({"middleware": Middleware()}, r"middleware=…\): expected a list, found"),
        ({"middleware": [Misspelt()]}, "Misspelt.exceute is never called. Did you mean 'execute'"),
        ({"context": None}, r"context=…\): expected a list, found None"),
        ({"middleware": [OnlyAsync()]}, "OnlyAsync has aexecute and no execute"),
        ({"middleware": [Awaiting()]}, "Awaiting.enqueue is called from code that cannot await"),
        ({"middleware": [Middleware]}, "expected an object of a class below Middleware"),
        ({"context": ["tenant"]}, "expected context variables"),
        ({"context": [tenant, ContextVar("tenant")]}, "each with a name of its own"),
    ],
)
def test_invalid_middleware_and_context_are_rejected_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Orchestrator(**given)


# -- costs


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of the product's functions, by name."""
    ours, found = str(Path(orchestrator.__file__).parent), Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ours) and not code.co_name.startswith("<"):
            found[code.co_name] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_without_middleware_no_further_function_is_called() -> None:
    """The numbers are those of the release before middleware. If you add a call on purpose, update the number."""
    app, _ = application()
    runner, plain = runner_of(app), app.tasks["plain"]
    for expected, act in ((33, lambda: plain.enqueue("a")), (21, lambda: runner.run(new_job("plain", "a")))):
        act()
        with counting() as found:
            act()
        assert found.total() == expected, found

    async def awaited() -> Counter[str]:
        await runner.run_async(new_job("later", "a"))
        job = new_job("later", "a")
        with counting() as found:
            await runner.run_async(job)
        return found

    found = asyncio.run(awaited())
    assert found.total() == 20, found
