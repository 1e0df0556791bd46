"""Patterns of redacted values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from orchestrator import Orchestrator, TaskContext
from orchestrator.api.inherited import inherited
from orchestrator.domain import timezones
from orchestrator.domain.redaction import HIDDEN, Redaction, Unsearchable, placed, scrub, split_patterns
from orchestrator.domain.tasks.callbacks import Callbacks
from orchestrator.domain.tasks.task import Dispatch, Failed, parse_options
from orchestrator.errors import InvalidTask
from orchestrator.settings import load_settings
from orchestrator.store.insights.redact import Family, Relative
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.calls import calls_of
from tests.outbox import KeptOutbox


def test_names_are_redacted_at_any_depth_and_paths_by_their_end() -> None:
    hidden = Redaction(["password", "card.*", "*_key"])
    data = {
        "user": "alice",
        "Password": "p",
        "inner": [{"password": ["a", "b"]}, {"api_key": 7}],
        "card": {"number": "4", "holder": {"name": "x"}},
        "cards": {"number": "4"},
    }
    assert hidden.redacted(data) == {
        "user": "alice",
        "Password": HIDDEN,
        "inner": [{"password": HIDDEN}, {"api_key": HIDDEN}],
        "card": {"number": HIDDEN, "holder": HIDDEN},
        "cards": {"number": "4"},
    }
    assert data["Password"] == "p"


def test_missing_values_stay_missing_and_no_patterns_redact_nothing() -> None:
    assert Redaction(["password"]).redacted({"password": None}) == {"password": None}
    assert Redaction().redacted({"password": "p"}) == {"password": "p"}
    assert not Redaction()


def test_patterns_for_positional_arguments_use_their_index() -> None:
    patterns = placed(["token", "card.number", "pass*"], ["user", "token", "card", "password"])
    assert patterns == ("@1", "@2.number", "@3")
    arguments, keywords = Redaction(patterns).redacted_call(["alice", "t", {"number": 1, "holder": 2}], {"x": 1})
    assert (arguments, keywords) == (["alice", HIDDEN, {"number": HIDDEN, "holder": 2}], {"x": 1})


def test_secrets_are_redacted_in_texts() -> None:
    secrets = Redaction(["@0", "password"]).secrets(
        ["tok-1"], {"password": ["two\nlines", 123456, True, "no"], "user": "bob"}
    )
    assert (
        scrub("tok-1, two\nlines or two\\nlines, 123456, True, no, bob", secrets)
        == "•••, ••• or •••, •••, True, no, bob"
    )


@pytest.mark.parametrize("given", [{"x": [0] * 490_000}, {"x": ["a"] * 200_000}, {"x": [{"a": 1, "b": 2}] * 10_000}])
def test_secrets_among_many_values_are_found_at_little_cost(given: dict[str, Any]) -> None:
    hidden = Redaction(["apikey", "card.*"])
    given = {"apikey": "tok-1", **given}
    assert calls_of(lambda: hidden.secrets((), given))["call"] < 15_000
    assert hidden.secrets((), given) == ("tok-1",)


@pytest.mark.parametrize(
    "given",
    [
        {"x": [{} for _ in range(60_000)]},
        {"x": {f"name {n}": n for n in range(60_000)}},
        {"card": {"numbers": [0] * 60_000}},
        {"card": {"numbers": [f"secret {n}" for n in range(1_001)]}},
    ],
)
def test_texts_are_redacted_wholly_if_secrets_exceed_the_search_limit(given: dict[str, Any]) -> None:
    hidden = Redaction(["apikey", "card.*"])
    assert calls_of(lambda: hidden.secrets((), given))["call"] < 10_000
    secrets = hidden.secrets((), given)
    assert scrub("it was tok-1", secrets) == HIDDEN
    assert scrub("", secrets) == ""
    with pytest.raises(Unsearchable, match=r"more than 50,000 fields, or 1,000 secrets"):
        hidden.secrets_in(given)
    family = Family([], [Relative((), timezones.encode([[], given]), None)], [], [], False)
    assert inherited(family, ["apikey", "card.*"]).is_whole


def test_a_secret_value_is_redacted_under_any_name() -> None:
    hidden = Redaction(["token"], ["tok-1", "123456"])
    data = {"session": "tok-1", "note": ["Bearer tok-1", 123456, 1234567, b"x tok-1"], "tok-1": None, "user": "eve"}
    assert hidden.redacted(data) == {
        "session": HIDDEN,
        "note": [f"Bearer {HIDDEN}", HIDDEN, 1234567, HIDDEN],
        HIDDEN: None,
        "user": "eve",
    }
    assert hidden.text("no tok-1 here") == f"no {HIDDEN} here"
    assert hidden.named("Token", "x") == HIDDEN
    assert Redaction(is_whole=True).redacted({"a": [1, None], "b": "x"}) == {"a": [HIDDEN, None], "b": HIDDEN}


def test_a_partially_known_family_is_redacted_as_a_whole() -> None:
    known = Family(
        ["token"],
        [Relative(("token",), timezones.encode([[], {"token": "tok-1"}]), None)],
        [{"token": "tok-2"}],
        [("token", timezones.encode("tok-3"))],
        False,
    )
    told = {"a": "tok-1", "b": "tok-2", "c": "tok-3", "user": "eve"}
    assert inherited(known, ()).redacted(told) == {"a": HIDDEN, "b": HIDDEN, "c": HIDDEN, "user": "eve"}
    assert inherited(known._replace(is_partial=True), ()).redacted(told) == dict.fromkeys(told, HIDDEN)
    assert inherited(known._replace(is_partial=True), (), ["b"]).redacted(told) == told | {"b": HIDDEN}


class Outcome(NamedTuple):
    """The outbox and the report of a failed task."""

    outbox: KeptOutbox
    report: Failed


def run_failing(function: Callable[..., Any], token: Any = "tok-1-long", **options: Any) -> Outcome:
    """Run a failing task in a worker."""
    app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")
    new = app.task(name="it", **options)(function)._new((), {"token": token})
    job = Job(Dispatch(new.id, 1, "it", new.payload, "default", new.options), Bundle("g", "default", "0-1", 1), 0, 0.0)
    job.begin(0.0)
    outbox = KeptOutbox()
    report = Runner(app, outbox, Allowed(app, ())).run(job)
    assert isinstance(report, Failed)
    return Outcome(outbox, report)


def test_a_worker_redacts_progress_and_passes_patterns_to_children() -> None:
    child = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere").task(name="child")(_take)

    def say(ctx: TaskContext, token: str) -> None:
        ctx.progress(0.5, f"with {token}")
        ctx.progress(0.6, "x" * 995 + token)  # the end is truncated
        ctx.log(token)
        child.enqueue(1)
        raise ValueError(token)

    said = run_failing(say, redact=("token",))
    told = msgspec.json.encode([said.outbox.marks, said.outbox.lines, said.report.error]).decode()
    assert "tok-1" not in told
    assert [mark.text for _, mark in said.outbox.marks] == [f"with {HIDDEN}", "x" * 995 + HIDDEN]
    assert [parse_options(task.options).inherited for task in said.outbox.tasks] == [("token",)]


def test_a_worker_redacts_all_output_of_a_task_with_too_many_secrets() -> None:
    def say(ctx: TaskContext, token: list[str]) -> None:
        ctx.progress(0.5, f"with {token[7]}")
        ctx.log(token[7])
        error = ValueError(token[7])
        error.token, error.number, error.other = "x", 12345, {"of": token[7]}  # type: ignore[attr-defined]
        raise error

    said = run_failing(say, [f"tok-{n}-long" for n in range(2_000)], redact=("token",))
    told = msgspec.json.encode([said.outbox.marks, said.outbox.lines, said.report.error]).decode()
    assert "tok-" not in told
    assert said.report.error.attributes == {HIDDEN: {HIDDEN: HIDDEN}}


def test_error_attributes_stay_data_when_a_number_is_secret() -> None:
    def say(token: int) -> None:
        error = ValueError("no")
        error.number = token  # type: ignore[attr-defined]
        raise error

    assert run_failing(say, 123_456, redact=("token",)).report.error.attributes == {"number": HIDDEN}


def _take(value: Any) -> None: ...


def test_callbacks_inherit_the_redacted_names_of_their_task() -> None:
    app = Orchestrator()
    last = app.task(name="last", redact=("pin",))(_take)
    after = app.task(name="after", on_success=last)(_take)
    first = app.task(name="first", redact=("token",), on_success=after, on_failure=last)(lambda token: token)
    callbacks = msgspec.json.decode(first._new((), {"token": 1}).callbacks or "", type=Callbacks)
    [following], [failed] = callbacks.success, callbacks.failure
    [end] = msgspec.json.decode(following.callbacks or "", type=Callbacks).success
    hidden = [parse_options(one.options) for one in (following, failed, end)]
    assert [(one.redact, one.inherited) for one in hidden] == [
        ((), ("token",)),
        (("pin",), ("token",)),
        (("pin",), ("token",)),
    ]


def test_the_redact_setting_is_a_string_or_a_list() -> None:
    assert split_patterns("password, card.*  token") == ("password", "card.*", "token")
    assert load_settings(environ={}, redact=["password", "card.*"]).redact == "password, card.*"
    assert load_settings(environ={"ORCHESTRATOR_REDACT": "a,b"}).redact == "a,b"


def test_a_task_stores_only_the_patterns_of_its_own_parameters() -> None:
    app = Orchestrator(load_settings(environ={}, redact="password"))

    @app.task(redact=("token",))
    def login(user: str, token: str, password: str) -> None: ...

    @app.task
    def plain(user: str) -> None: ...

    carried = login._redacting_options.to_task_options(1.0)
    assert (carried.redact, carried.inherited) == (("token", "@1", "@2"), ("password",))
    carried = plain._redacting_options.to_task_options(1.0)
    assert (carried.redact, carried.inherited) == ((), ("password",)), "a field of an argument may be named so"
    unset = Orchestrator(load_settings(environ={})).task(name="unset")(lambda: None)
    assert unset._place((), {}).options is None
    with pytest.raises(InvalidTask, match="Option redact"):
        app.task(redact="token")(lambda token: token)
