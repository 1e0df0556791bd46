"""One attempt of a task of `orchestrator.compat.celery` in a worker: which hooks, signals and callbacks are called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from orchestrator.compat.celery import Celery, Task, chain, chord, composing, exceptions, group, signals
from orchestrator.compat.celery.app import execution
from orchestrator.compat.celery.exceptions import NotCovered, SoftTimeLimitExceeded, TimeLimitExceeded
from orchestrator.compat.celery.request import MESSAGE
from orchestrator.compat.dramatiq.errors import TimeLimitExceeded as ActorStopped
from orchestrator.compat.rq.exceptions import JobTimeoutException
from orchestrator.domain.tasks.task import Dispatch, Failed, NewTask, Succeeded
from orchestrator.errors import InvalidTask, TaskAborted
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.middleware import AttemptEnd
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.sdk.values.payload import decode_value
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.outbox import KeptOutbox

heard: list[str] = []


class Noting(Task):
    abstract = True

    def on_success(self, retval: Any, *_: Any) -> None:
        heard.append(f"on_success {retval!r}")

    def on_failure(self, exc: Any, *_: Any) -> None:
        heard.append(f"on_failure {type(exc).__name__}")

    def after_return(self, status: str, *_: Any) -> None:
        heard.append(f"after_return {status}")


SENT = {
    signals.task_success: lambda result, **_: heard.append(f"task_success {result!r}"),
    signals.task_failure: lambda exception, **_: heard.append(f"task_failure {type(exception).__name__}"),
    signals.task_revoked: lambda request, **_: heard.append(f"task_revoked {request.task}"),
    signals.before_task_publish: lambda headers, body, **_: heard.append(f"publish {headers['task']} {body[0]}"),
}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setattr(execution, "_watched", None)
    heard.clear()
    made = Celery("unit", task_cls=Noting)
    yield made
    for signal in SENT:
        signal.receivers.clear()


def listen(*wanted: signals.Signal) -> None:
    for signal in wanted:
        signal.connect(SENT[signal])


def run_attempt(task: Any, *args: Any, run: bytes | None = None, outbox: Any = None, **kwargs: Any) -> Any:
    """Run one attempt of a call, as a worker does; return its report."""
    new = task._registered()._new(args, kwargs)
    return ran(task, new, run, outbox)


def ran(task: Any, new: NewTask, run: bytes | None = None, outbox: Any = None) -> Any:
    dispatch = Dispatch(new.id, 1, new.name, new.payload, "default", options=new.options, run_id=run)
    job = Job(dispatch, Bundle("g", "default", "0-1", 1), 0, 0.0)
    job.begin(0.0)
    native = task.app.orchestrator
    return Runner(native, outbox or KeptOutbox(), Allowed(native, ())).run(job)


@pytest.mark.parametrize(
    "value", [{1, 2}, (i for i in range(3)), 2**70, "x" * 2_000_000], ids=["set", "generator", "large int", "large"]
)
def test_an_unstorable_result_is_a_failure_and_never_a_success(app: Celery, value: Any) -> None:
    listen(signals.task_success, signals.task_failure)
    errback = app.task(name="unit.errback")(lambda *args: heard.append(f"errback {type(args[1]).__name__}"))
    task = app.task(name="unit.returns")(lambda: value)
    report = run_attempt(task, _celery={"errbacks": [dict(errback.s())]})
    assert heard == [
        "errback EncodeError",
        "on_failure EncodeError",
        "task_failure EncodeError",
        "after_return FAILURE",
    ]
    assert isinstance(report, Failed)
    assert report.error.kind == "orchestrator.compat.celery.exceptions.EncodeError"


def test_an_ignored_result_may_be_any_value(app: Celery) -> None:
    assert isinstance(run_attempt(app.task(name="unit.any", ignore_result=True)(lambda: {1, 2})), Succeeded)
    assert heard == ["on_success {1, 2}", "after_return SUCCESS"]


def test_a_replaced_task_has_not_failed(app: Celery) -> None:
    listen(signals.task_failure)
    other = app.task(name="unit.other")(lambda: 5)
    task = app.task(name="unit.replaced", bind=True)(lambda self: self.replace(other.s()))
    for run in (None, new_id()):
        outbox = KeptOutbox()
        report = run_attempt(task, run=run, outbox=outbox)
        assert (heard, isinstance(report, Succeeded)) == ([], run is None)
        assert run is None or report.error.kind.endswith("Again")
        assert [new.name for new in outbox.tasks or report.children] == ["unit.other"]


def test_a_task_revoked_in_a_blocking_call_sends_one_signal(app: Celery) -> None:
    listen(signals.task_revoked)
    execution.watch_stops(app)
    [hook] = app.orchestrator.middleware
    task: Any = app.task(name="unit.blocked", bind=True)(lambda self: block(self.request.native))

    def block(ctx: TaskContext) -> None:
        hook.ended(ctx, AttemptEnd(outcome="cancelled"))
        assert heard == ["task_revoked unit.blocked"]
        raise TaskAborted

    assert isinstance(run_attempt(task), Failed)
    assert heard == ["task_revoked unit.blocked"]


def test_a_retry_does_not_start_after_the_calls_expires(app: Celery) -> None:
    listen(signals.task_revoked)
    calls: list[int] = []
    task = app.task(name="unit.expiring")(lambda: calls.append(1))
    for expires, times in (("2000-01-01T00:00:00+00:00", 0), ("2100-01-01T00:00:00+00:00", 1)):
        report = ran(task, task._registered()._new((), {MESSAGE: {"expires": expires, "retries": 1}}))
        assert (isinstance(report, Succeeded), len(calls)) == (bool(times), times)
        assert times or report.error.kind.endswith("TaskRevokedError")
    assert heard == ["task_revoked unit.expiring", "on_success None", "after_return SUCCESS"]


def test_a_retry_sends_the_publish_signal(app: Celery) -> None:
    listen(signals.before_task_publish)
    task = app.task(name="unit.again", bind=True)(lambda self, x: self.retry(args=(x + 1,), countdown=0))
    run_attempt(task, 1)
    assert heard == ["publish unit.again (2,)"]


def test_a_part_whose_class_has_its_own_apply_async_is_named_in_a_warning(app: Celery) -> None:
    class OfTenant(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            return super().apply_async(*args, **options)

    task: Any = app.task(name="unit.of_tenant", base=OfTenant)(lambda: None)
    with pytest.warns(UserWarning, match=r"unit\.of_tenant: its own apply_async is not called"):
        composing.compose(app, chain(task.si(), task.si()), ())


def queues_of(app: Celery, sig: Any, **options: Any) -> list[str]:
    """Return the queues of a composition's calls, in order, as its start sends them."""
    part = composing.compose(app, composing._prepared(sig.clone(), (), {}, {**sig.options, **options}), ())
    return [one.task._call_options.queue for one in part._calls()]


def test_options_of_compositions_are_those_of_their_parts(app: Celery) -> None:
    task: Any = app.task(name="unit.part")(lambda x=0: x)
    one = task.s()
    assert queues_of(app, chord([one, one], one), queue="slow") == ["slow"] * 3
    assert queues_of(app, chord([one, one], one, queue="slow")) == ["slow"] * 3
    assert queues_of(app, chord(group([one, one], queue="slow"), one)) == ["slow", "slow", "default"]
    assert queues_of(app, chord([one, one | one], one | one), queue="slow") == [
        "slow",
        "slow",
        "default",
        "slow",
        "default",
    ]
    assert queues_of(app, chord([one.set(queue="own")], one), queue="slow") == ["slow", "slow"]
    one = task.s()
    assert queues_of(app, one | chord([one, one], one, queue="slow")) == ["default", "slow", "slow", "slow"]
    assert queues_of(app, one | group([one, group([one], queue="slow")])) == ["default", "default", "slow"]
    assert queues_of(app, group([task.map([1, 2])]), queue="slow") == ["slow"]


def test_the_countdown_of_a_chords_start_is_for_its_body(app: Celery) -> None:
    task: Any = app.task(name="unit.part")(lambda x=0: x)
    for sig, options, delays in (
        (chord([task.s()], task.s()), {"countdown": 5}, [0, 5]),
        (chord([task.s()], task.s(), countdown=5), {}, [5, 5]),
    ):
        part = composing.compose(app, composing._prepared(sig.clone(), (), {}, {**sig.options, **options}), ())
        assert [call.task._call_options.delay or 0 for call in part._calls()] == delays


def test_time_limit_exceptions_have_a_message_in_hooks(app: Celery) -> None:
    assert str(TimeLimitExceeded()) == "ran longer than its timeout"
    assert str(SoftTimeLimitExceeded()) == "ran longer than its soft timeout"
    assert str(TimeLimitExceeded("other words")) == "other words"


def test_exceptions_of_time_limits_are_no_errors_of_the_operating_system() -> None:
    for cls in (TimeLimitExceeded, SoftTimeLimitExceeded, exceptions.TimeoutError, JobTimeoutException):
        assert not issubclass(cls, OSError)
    assert not issubclass(ActorStopped, Exception)  # nor in Dramatiq


def test_a_task_sees_its_own_state_and_the_priority_of_its_route(app: Celery) -> None:
    seen: list[Any] = []

    def look(self: Any) -> None:
        seen.append((self.AsyncResult(self.request.id).state, self.request.delivery_info["priority"]))
        self.update_state(state="PROGRESS", meta={"current": 1})
        seen.append(self.AsyncResult(self.request.id).info)

    app.conf.task_routes = {"unit.tracked": {"queue": "a", "priority": 4}}
    run_attempt(app.task(name="unit.tracked", bind=True, track_started=True)(look))
    run_attempt(app.task(name="unit.plain", bind=True)(look))
    assert seen == [("STARTED", 4), {"current": 1}, ("PENDING", None), {"current": 1}]


def test_the_priority_of_a_routing_function_travels_with_the_call(app: Celery) -> None:
    app.conf.task_routes = lambda name, *_, **__: {"queue": "a", "priority": 4} if name == "unit.routed" else None
    task = app.task(name="unit.routed", bind=True)(lambda self: self.request.delivery_info["priority"])
    outbox = KeptOutbox()
    run_attempt(app.task(name="unit.caller")(lambda: task.delay().id), outbox=outbox)
    assert decode_value(ran(task, outbox.tasks[0]).result) == 4
    part = composing.compose(app, task.s(), ())
    assert part.kwargs["_celery"]["priority"] == 4  # type: ignore[attr-defined]


def test_meta_that_is_too_long_is_dropped_and_the_task_continues(app: Celery) -> None:
    def tell(self: Any) -> None:
        self.update_state(state="PROGRESS", meta={"current": 1, "total": 2, "text": "x" * 5_000})

    outbox = KeptOutbox()
    assert isinstance(run_attempt(app.task(name="unit.long", bind=True)(tell), outbox=outbox), Succeeded)
    [(_, mark)] = outbox.marks
    assert (json.loads(mark.text), mark.fraction) == ({"state": "PROGRESS", "meta": None}, 0.5)
    assert "5,0" in outbox.lines[0][1].text


def test_a_bound_error_callback_is_given_the_id(app: Celery) -> None:
    given: list[Any] = []
    failing = app.task(name="unit.fails")(lambda: 1 / 0)
    bound = app.task(name="unit.bound", bind=True)(lambda self, *args: (self, args))
    plain = app.task(name="unit.plain")(lambda *args: given.append(len(args)))
    outbox = KeptOutbox()
    run_attempt(failing, _celery={"errbacks": [dict(bound.s()), dict(plain.s())]}, outbox=outbox)
    assert given == [3]
    [called] = outbox.tasks
    (args, _) = decode_value(called.payload)[:2]
    assert (called.name, len(args), bool(UUID(args[0]))) == ("unit.bound", 1, True)


def test_programs_cannot_pass_the_internal_message_argument(app: Celery) -> None:
    task = app.task(name="unit.named")(lambda x, **kwargs: (x, kwargs))
    for call in (task.delay, task.s(1).delay):
        with pytest.raises(NotCovered, match="an argument named _celery"):
            call(_celery=2, **({"x": 1} if call == task.delay else {}))
    with pytest.raises(InvalidTask, match="Expected unit.pair") as wrong:
        chain(app.task(name="unit.pair")(lambda x, y: (x, y)).si(1), task.s()).delay()
    assert "_celery" not in str(wrong.value)
