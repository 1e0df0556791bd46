"""`orchestrator.compat.celery` without services: settings, schedules, routes, eager mode, rejections."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from copy import copy, deepcopy
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.compat.celery import Celery, Task, chain, chord, group, outcomes, shared_task, signals, signature
from orchestrator.compat.celery.app import calls, execution, periodic, registering, routes
from orchestrator.compat.celery.exceptions import ImproperlyConfigured, NotCovered, NotRegistered, Retry
from orchestrator.compat.celery.request import MESSAGE
from orchestrator.compat.celery.schedules import crontab, schedule, solar
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import Dispatch, Succeeded
from orchestrator.sdk.modules import ImportFailed
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.outbox import ClosedOutbox


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("unit")
    made.conf.task_always_eager = True
    yield made
    for signal in (signals.task_prerun, signals.task_success, signals.before_task_publish):
        signal.receivers.clear()


def adding(app: Celery) -> Any:
    return app.task(name="unit.add")(lambda x, y: x + y)


# -- settings


def test_settings_have_old_new_and_namespaced_names() -> None:
    app = Celery("unit", broker="redis://here/1")
    app.conf.update(CELERY_TASK_RESULT_EXPIRES=60, CELERYD_CONCURRENCY=4)
    app.config_from_object(SimpleNamespace(SHOP_TASK_TIME_LIMIT=30, DEBUG=True, CELERY_TIMEZONE="X"), namespace="SHOP")
    assert (app.conf.worker_concurrency, app.conf.task_time_limit, app.conf["CELERY_TIMEZONE"]) == (4, 30, None)
    assert app.conf.broker_url == "redis://here/1"
    assert app.conf.task_default_queue == "celery"
    assert not hasattr(app.conf, "no_such_setting")


def test_settings_without_an_effect_are_named_in_one_warning() -> None:
    with pytest.warns(UserWarning, match="broker_pool_limit, colour, worker_prefetch_multiplier"):
        Celery("unit", changes={"broker_pool_limit": 1, "worker_prefetch_multiplier": 2, "colour": "red"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Celery("unit").config_from_object({"task_time_limit": 3, "DEBUG": True}, force=True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("task_serializer", "pickle"), ("worker_pool", "gevent"), ("beat_scheduler", "x:DatabaseScheduler")],
)
def test_settings_with_unsupported_values_are_rejected(setting: str, value: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=setting):
        Celery("unit").conf.update({setting: value})


@pytest.mark.parametrize(("setting", "value"), [("timezone", "Mars/X"), ("worker_concurrency", -1)])
def test_settings_with_invalid_values_are_rejected_at_once(setting: str, value: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"{setting}: expected .* found {value!r}"):
        Celery("unit").conf.update({setting: value})


def test_a_missing_settings_module_is_named() -> None:
    app = Celery("unit")
    app.config_from_object("no_such_settings")
    with pytest.raises(ImproperlyConfigured, match=r"config_from_object\('no_such_settings'\)"):
        app._configure()


def test_library_settings_are_kept_and_misspelled_settings_are_named() -> None:
    app = Celery("unit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        app.conf.ONCE = {"backend": "redis"}
    assert (app.conf.ONCE, app.conf.get("ONCE")) == ({"backend": "redis"},) * 2
    with pytest.warns(UserWarning, match="task_time_limitt"):
        app.conf.update(TASK_TIME_LIMITT=3)


# -- tasks and options


def test_libraries_can_pass_their_own_options(app: Celery) -> None:
    class Once(Task):
        abstract = True

        def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
            assert (self._get_app() is app, options["once"]) == (True, {"graceful": True})
            return super().apply_async(args, kwargs, *more, **options)

    add = app.task(base=Once, name="unit.once")(lambda x, y: x + y)
    assert add.apply_async((1, 2), once={"graceful": True}).get() == 3
    assert calls.message_of(None, None, {"once": {"graceful": True}}) == {"properties": {"once": {"graceful": True}}}
    with pytest.raises(TypeError, match="Did you mean 'countdown'"):
        calls.native_options(routes.Invocation(app, "unit.once", (), {}, {"countdwon": 3}, add))


def test_a_rejection_reads_the_same_in_the_caller() -> None:
    text = str(NotCovered("allow_join_result", "Link it."))
    assert str(outcomes.rebuilt("orchestrator.compat.celery.exceptions.NotCovered", text, {})) == text


def test_task_options_combine_decorator_settings_and_routes(app: Celery) -> None:
    app.conf.update(task_time_limit=30, task_routes=([("unit.*", {"queue": "a"})], {"other.*": "b"}))
    task = app.task(name="unit.limited", rate_limit="10/m", soft_time_limit=40, ignore_result=True)(lambda: None)
    assert registering.options_of(task) == {"queue": "a", "timeout": 30, "rate": "10/m", "store_result": False}
    assert routes.find(routes.Invocation(app, "other.x")) == {"queue": "b"}
    app.conf.task_routes = (by_first_argument,)
    assert calls.native_options(routes.Invocation(app, "unit.x", (7,), {}, {})) == {"queue": "for-7"}


def test_explicit_early_acknowledgement_runs_a_task_at_most_once() -> None:
    for conf, said, expected in (
        ({}, {}, None),
        ({}, {"acks_late": True}, None),
        ({}, {"acks_late": False}, "fail"),
        ({"task_acks_late": False}, {}, "fail"),
        ({"task_acks_late": False}, {"acks_late": True}, None),
    ):
        task = Celery("unit", changes=conf).task(name="unit.once", **said)(lambda: None)
        assert registering.options_of(task).get("on_loss") == expected


def test_an_error_in_a_router_is_not_taken_for_an_old_router(app: Celery) -> None:
    def broken(name: str, args: Any = (), kwargs: Any = None, options: Any = None, task: Any = None) -> Any:
        return None if options is None else name + 1  # type: ignore[operator]

    app.conf.task_routes = broken
    with pytest.raises(TypeError, match="concatenate"):
        routes.find(routes.Invocation(app, "unit.x"))
    for given in (OldRouter, OldRouter(), f"{__name__}.OldRouter"):
        app.conf.task_routes = [given]
        assert routes.find(routes.Invocation(app, "unit.x", (7,))) == {"queue": "old-7"}


class OldRouter:
    def route_for_task(self, name: str, args: Any, kwargs: Any) -> dict[str, str]:  # noqa: ARG002
        return {"queue": f"old-{args[0]}"}


def by_first_argument(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_: Any) -> dict[str, str]:
    return {"queue": f"for-{args[0]}"}


def test_call_options_become_native_options(app: Celery) -> None:
    when = datetime(2030, 1, 1)
    given = {"eta": when, "expires": timedelta(minutes=1), "priority": 3, "queue": "celery", "time_limit": 5}
    assert calls.native_options(routes.Invocation(app, "unit.x", (), {}, given)) == {
        "eta": when.replace(tzinfo=UTC),
        "expires": 60.0,
        "priority": 3,
        "queue": "default",
        "timeout": 5,
        "soft_timeout": None,
    }
    app.conf.broker_url = "redis://here"
    assert calls.native_options(routes.Invocation(app, "unit.x", (), {}, {"priority": 3})) == {"priority": -3}


@pytest.mark.parametrize("enable_utc", [True, False])
def test_a_naive_time_is_utc_in_every_time_zone_of_the_program(enable_utc: bool) -> None:
    app = Celery("unit", changes={"timezone": "Europe/Berlin", "enable_utc": enable_utc})
    task = app.task(name="unit.until", expires=datetime(2030, 1, 1, 12))(lambda: None)
    for when in (datetime(2030, 1, 1, 12), "2030-01-01T12:00:00"):
        options = calls.native_options(routes.Invocation(app, "unit.x", (), {}, {"eta": when, "expires": when}))
        assert options == dict.fromkeys(("eta", "expires"), datetime(2030, 1, 1, 12, tzinfo=UTC))
    assert registering.options_of(task)["expires"] == datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert execution._seconds_until(datetime.now(UTC).replace(tzinfo=None) + timedelta(minutes=1)) > 55


def test_task_classes_and_annotations_are_applied() -> None:
    class InContext(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return ["context", self.run(*args, **kwargs), self.request.called_directly]

    app = Celery("unit", task_cls=InContext)
    app.conf.task_annotations = {"*": {"max_retries": 9}, "unit.add": {"rate_limit": "5/s"}}
    add = adding(app)
    app._configure()
    assert (add.max_retries, add.rate_limit) == (9, "5/s")
    assert add.apply((1, 2)).get() == ["context", 3, False]
    assert add(1, 2) == ["context", 3, True]


def test_retries_run_in_eager_mode(app: Celery) -> None:
    tries: list[int] = []

    @app.task(bind=True, autoretry_for=(OSError,), retry_backoff=True, retry_kwargs={"max_retries": 2})
    def shaky(self: Any) -> None:
        tries.append(self.request.retries)
        raise OSError("away")

    result = shaky.delay()
    assert (tries, result.state, repr(result.result)) == ([0, 1, 2], "FAILURE", "OSError('away')")
    with pytest.raises(Retry):
        app.task(bind=True, name="unit.direct")(lambda self: self.retry())()


# -- canvas


def test_a_canvas_runs_in_eager_mode(app: Celery) -> None:
    add, total = adding(app), app.task(name="unit.total")(sum)
    assert (add.s(1, 2) | add.s(3)).delay().get() == 6
    assert group(add.s(i, i) for i in range(3))().get() == [0, 2, 4]
    assert chord([add.s(1, 1), add.s(2, 2)])(total.s()).get() == 6
    assert add.starmap([(1, 2)]).delay().get() == [3]
    assert app.task(bind=True, name="unit.replaced")(lambda self: self.replace(add.s(4, 1))).delay().get() == 5
    assert chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s()).apply_async().get() == 7


def test_signatures_survive_json(app: Celery) -> None:
    add = adding(app)
    for sig in (add.s(1, 2), add.si(1) | add.s(3), group([add.s(1, 1)]), chord([add.s(1, 1)], add.s(2)), add.map([1])):
        again = signature(json.loads(json.dumps(sig)), app=app)
        assert json.dumps(again, sort_keys=True) == json.dumps(sig, sort_keys=True)
        assert type(again) is type(sig)
    assert add.s(2).clone((1,), {"y": 3}).args == (1, 2)
    assert add.si(2).clone((1,)).args == (2,)


@pytest.mark.parametrize("first", ["call", "chain", "group", "chord"])
def test_a_signature_can_be_chained_in_place(app: Celery, first: str) -> None:
    add, total, ran = adding(app), app.task(name="unit.total")(sum), list[str]()
    note = app.task(name="unit.note")(ran.append)
    sig: Any = note.s("first")
    sig |= note.si("second")
    sig.delay()
    assert ran == ["first", "second"]
    shapes = {
        "call": add.s(1, 2),
        "chain": chain(add.s(1, 1), add.s(1)),
        "group": group(add.s(1, 1), add.s(0, 1)) | total.s(),
        "chord": chord([add.s(1, 1), add.s(0, 1)], total.s()),
    }
    sig, whole = shapes[first], shapes[first] | add.s(4)
    sig |= add.s(4)
    assert (type(sig), sig, sig.delay().get()) == (type(whole), whole, 7)
    for again in (copy(sig), deepcopy(sig), pickle.loads(pickle.dumps(sig))):
        assert (type(again), again) == (type(sig), sig)
    assert type(dict(sig)) is dict
    many: Any = group(add.s(1, 1), add.s(0, 1))
    many |= total.s()
    assert many.delay().get() == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        sig |= 5


# -- schedules, signals, rejections


def test_schedules_become_native_schedules() -> None:
    assert crontab(minute="*/15", hour=[3, 1], day_of_week="Monday,fri").times() == {"cron": "*/15 1,3 * * mon,fri"}
    assert schedule(timedelta(minutes=2)).times() == {"every": 120.0}
    for refused in (lambda: solar("sunset", 1, 2), lambda: crontab(day_of_month=1, day_of_week=1)):
        with pytest.raises(NotCovered):
            refused()
    app = Celery("unit", changes={"timezone": "Europe/Berlin"})
    add = adding(app)
    app.conf.beat_schedule = {"a b": {"task": "unit.add", "schedule": crontab(hour=3, minute=0), "args": (1, 2)}}
    app.add_periodic_task(5, add.s(3, y=Decimal("4.0")), name="added")
    periodic.declare(app)
    declared = app.orchestrator.schedules._declared
    assert dict(declared["a-b"].params) == {"x": 1, "y": 2}
    assert declared["a-b"].times == {"cron": "0 3 * * *", "overlap": "allow", "timezone": "Europe/Berlin"}
    assert declared["added"].times == {"every": 5.0, "overlap": "allow"}
    assert dict(declared["added"].params) == {"x": 3, "y": {"__type__": "decimal", "__value__": "4.0"}}
    with pytest.warns(UserWarning, match="every 0.5 s fires every second"):
        assert schedule(0.5).times() == {"every": 1.0}
    app.add_periodic_task(5, add.s(3, y=4), name="told", priority=3, time_limit=20, headers={"a": "b"})
    periodic.declare(app)
    told = app.orchestrator.schedules._declared["told"].params[MESSAGE]
    assert told == {"headers": {"a": "b"}, "priority": 3, "timelimit": [20, None]}
    with pytest.raises(NotCovered, match="periodic chain"):
        app.add_periodic_task(5, add.s(1, 1) | add.s(1))


def test_a_signal_receiver_can_choose_its_sender(app: Celery) -> None:
    add, heard = adding(app), list[int]()
    signals.task_success.connect(lambda result, **_: heard.append(result), sender=add, weak=False)
    signals.task_prerun.connect(lambda **_: 1 / 0, dispatch_uid="broken")
    add.delay(1, 2)
    app.task(name="unit.other")(lambda: 5).delay()
    assert heard == [3]
    assert signals.task_prerun.disconnect(dispatch_uid="broken")


def test_a_shared_task_belongs_to_the_current_application(app: Celery) -> None:
    @shared_task(name="unit.shared")
    def shared(x: int) -> int:
        return 2 * x

    assert (shared.delay(2).get(), shared.name, shared.app) == (4, "unit.shared", app)
    other = Celery("other", changes={"task_always_eager": True})
    assert shared.app is other
    assert "unit.shared" in other.tasks


def test_unsupported_calls_name_an_alternative(app: Celery) -> None:
    with pytest.raises(NotCovered, match="Run `orchestrator celery -A module worker`."):
        app.worker_main(["worker"])  # type: ignore[attr-defined]
    assert not hasattr(app, "amqp")
    with pytest.raises(NotRegistered):
        app.tasks["unit.nothing"]
    with pytest.raises(TypeError, match="list or tuple"):
        adding(app).apply_async("ab")


def test_events_are_rejected_with_an_alternative(app: Celery) -> None:
    with pytest.raises(NotCovered, match="metrics"):
        app.events.Receiver(None)  # type: ignore[attr-defined]
    with pytest.raises(NotCovered, match="Log a line"):
        adding(app).send_event("task-custom")
    with pytest.warns(UserWarning, match="task_send_sent_event, worker_send_task_events"):
        Celery("unit", changes={"worker_send_task_events": True, "task_send_sent_event": True})
    for command in ("events", "flower"):
        refused = CliRunner().invoke(main, ["celery", "-A", "proj", command])
        assert (refused.exit_code != 0, "dashboard" in refused.output) == (True, True)


@pytest.mark.parametrize(
    "words", [["--args=[1,"], ["-a", "5"], ["--kwargs=[1]"], ["--eta", "soon"], ["--expires", "later"]]
)
def test_invalid_arguments_of_a_call_by_name_are_usage_errors(words: list[str]) -> None:
    refused = CliRunner().invoke(main, ["celery", "-A", "proj", "call", "unit.add", *words])
    assert (refused.exit_code, "Invalid value for" in refused.output) == (2, True)


@pytest.mark.parametrize("code", ["import no_such_library", "1 / 0", "raise SystemExit(3)"])
@pytest.mark.parametrize("where", ["broken_shop", "broken_shop.celery", "whole_shop.celery"])
def test_a_program_that_cannot_be_imported_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, where: str
) -> None:
    for package, own in (("broken_shop", code), ("whole_shop", "")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"{own}\n")
        (tmp_path / package / "celery.py").write_text(f"{code}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    refused = CliRunner().invoke(main, ["celery", "-A", where, "status"])
    assert isinstance(refused.exception, (ImportFailed, SystemExit))
    assert "cannot be loaded" in f"{refused.output}{refused.exception}"


# -- in a worker


def test_a_request_computes_fields_on_read_and_keeps_assigned_values() -> None:
    app, seen = Celery("unit"), []

    @app.task(name="unit.seen", bind=True)
    def see(self: Any, x: int) -> int:
        request = self.request
        request.root_id = "mine"
        seen.append(
            (request.id, request.hostname, request.root_id, request.args, request.no_such_field, request.native)
        )
        assert vars(copy(request))["task"] == "unit.seen"
        return x

    native = see._registered()
    new = native._new((3,), {})
    job = Job(Dispatch(new.id, 2, new.name, new.payload, "default"), Bundle("g", "default", "0-1", 1), 0, 0.0)
    job.begin(0.0)
    report = Runner(app.orchestrator, ClosedOutbox(), Allowed(app.orchestrator, ())).run(job)
    assert isinstance(report, Succeeded)
    [(identifier, host, *others, ctx)] = seen
    assert (identifier, others) == (to_text(new.id), ["mine", [3], None])
    assert (host.startswith("celery@"), ctx.attempt) == (True, 2)


def test_a_failure_hook_in_an_annotation_is_watched_for_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_watched", None)
    app = Celery("unit", changes={"task_annotations": {"unit.add": {"on_failure": lambda *_: None}}})
    adding(app)
    app._configure()
    execution.watch_stops(app)
    assert execution._watched == {}
