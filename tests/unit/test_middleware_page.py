"""The examples of docs/middleware.md work as described."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
import structlog
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from orchestrator import Orchestrator
from orchestrator.domain.tasks.task import Failed, Succeeded
from tests.acceptance.pages import files_in
from tests.unit.test_middleware import Stored, new_job, runner_of

EXAMPLES = files_in(Path(__file__).parents[2] / "docs" / "middleware.md")


def example(name: str) -> tuple[dict[str, Any], Orchestrator, Stored]:
    names: dict[str, Any] = {"__name__": name.removesuffix(".py")}
    exec(compile(EXAMPLES[name], name, "exec"), names)
    app, stored = names["app"], Stored()
    app._client._backend = stored
    return names, app, stored


def test_every_example_is_tested() -> None:
    assert set(EXAMPLES) == {"timing.py", "tenants.py", "observed.py"}


def test_the_timing_example_logs_durations_and_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, app, stored = example("timing.py")
    app.tasks["timing.resize"].enqueue("a.png")
    runner, job = runner_of(app), new_job("timing.resize", "a.png", options=stored.new[0].options)
    assert isinstance(runner.run(job), Succeeded)
    assert re.search(r"timing\.resize waited \d\.\d+ s and ran 0\.\d+ s", caplog.text)
    job = new_job("timing.resize", "a.png", options=stored.new[0].options)
    runner.ended(job, runner.failures.failure(job, ValueError()))
    assert "timing.resize: failure ValueError" in caplog.text


def test_the_tenants_example_requires_and_restores_a_tenant() -> None:
    names, app, stored = example("tenants.py")
    with pytest.raises(PermissionError, match=r"tenants\.invoice: no tenant"):
        app.tasks["tenants.invoice"].enqueue(7)
    assert stored.new == []
    token = names["tenant"].set("acme")
    app.tasks["tenants.invoice"].enqueue(7)
    names["tenant"].reset(token)
    report = runner_of(app).run(new_job("tenants.invoice", 7, options=stored.new[0].options))
    assert isinstance(report, Succeeded)
    assert report.result == b"\xa6acme-7"


class KeptEvents(Transport):
    """Keeps events instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.events.append(envelope.get_event())


def test_the_observed_example_reports_errors_and_log_context() -> None:
    _, app, _ = example("observed.py")
    lines: list[Any] = []
    processors: list[Any] = [structlog.contextvars.merge_contextvars, lambda *event: lines.append(event[2])]
    log = structlog.wrap_logger(None, processors)

    @app.task(name="work")
    def work(word: str) -> None:
        log.info("works")
        raise ValueError(word)

    kept = KeptEvents()
    with sentry_sdk.new_scope():
        sentry_sdk.init("https://key@sentry.invalid/1", transport=kept, default_integrations=False)
        try:
            assert isinstance(runner_of(app).run(new_job("work", "no")), Failed)
        finally:
            sentry_sdk.get_global_scope().set_client(None)
    (event,) = kept.events
    assert (event["transaction"], event["tags"]["attempt"]) == ("work", 1)
    assert event["exception"]["values"][0]["type"] == "ValueError"
    assert [(line["task"], line["attempt"]) for line in lines] == [("work", 1)]
    assert structlog.contextvars.get_contextvars() == {}
