"""The span of the current code, and span ids that are derived instead of sent."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import subprocess
import sys
from uuid import uuid4

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from orchestrator.log_format import JsonFormatter
from orchestrator.trace_context import (
    attempt_span,
    below,
    current_trace,
    is_trace,
    own_trace,
    parse,
    run_span,
    set_trace,
)
from orchestrator.tracing.calls import context_below
from orchestrator.tracing.spans import Spans
from orchestrator.tracing.switch import exporting

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def in_empty_context(function: object) -> object:
    return contextvars.Context().run(function)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (PARENT, True),
        (PARENT.replace("-01", "-00"), True),
        (PARENT.upper(), False),
        (PARENT + "-more", False),
        (PARENT + "\n", False),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", False),
        ("ff" + PARENT[2:], False),
        ("", False),
        (None, False),
    ],
)
def test_an_invalid_traceparent_is_parsed_as_none(text: str | None, is_one: bool) -> None:
    assert (parse(text) is not None) == is_one
    assert text is None or is_trace(text) == is_one


def test_a_later_version_is_read_but_not_sent() -> None:
    later = "01" + PARENT[2:] + "-what-comes-then"
    assert str(parse(later)) == PARENT
    assert not is_trace(later)


def test_a_span_of_opentelemetry_precedes_the_set_trace() -> None:
    def look() -> None:
        assert current_trace() is None
        set_trace(PARENT)
        assert current_trace() == PARENT
        other = below(PARENT, "1" * 16)
        with trace.use_span(trace.get_current_span(context_below(other))):
            assert current_trace() == other
        assert current_trace() == PARENT

    in_empty_context(look)


def test_a_log_line_has_the_ids_of_its_span() -> None:
    def write() -> None:
        set_trace(PARENT)
        line = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "hello"})))
        assert (line["trace_id"], line["span_id"]) == (PARENT[3:35], PARENT[36:52])

    in_empty_context(write)
    assert "trace_id" not in json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "hello"})))


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exported: InMemorySpanExporter) -> Spans:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return Spans(provider)


def test_span_ids_derive_from_the_ids_of_tasks_and_runs(spans: Spans, exported: InMemorySpanExporter) -> None:
    task, run = uuid4().bytes, uuid4().bytes
    for attempt in (1, 2):
        spans.end(spans.attempt(PARENT, task, attempt, "job", is_turn=False, attributes={}), None)
    spans.run(PARENT, run, "flow", 1.0, 2.0, "failed", {})
    first, second, whole = exported.get_finished_spans()
    assert f"{first.context.span_id:016x}" == attempt_span(task, 1)
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert f"{whole.context.span_id:016x}" == run_span(run)
    assert {span.context.trace_id for span in (first, second, whole)} == {int(PARENT[3:35], 16)}
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == PARENT[36:52]
    assert (whole.start_time, whole.end_time, whole.status.is_ok) == (10**9, 2 * 10**9, False)


def test_attempts_of_a_task_without_a_parent_span_share_a_trace(spans: Spans, exported: InMemorySpanExporter) -> None:
    task = uuid4().bytes
    for attempt in (1, 2):
        spans.end(spans.attempt(None, task, attempt, "job", is_turn=False, attributes={}), None)
    first, second = exported.get_finished_spans()
    assert (first.parent, second.parent) == (None, None)
    assert {f"{span.context.trace_id:032x}" for span in (first, second)} == {own_trace(task)}
    assert second.links[0].context.trace_id == first.context.trace_id


def test_a_run_without_a_parent_span_is_the_root_of_its_trace(spans: Spans, exported: InMemorySpanExporter) -> None:
    run = uuid4().bytes
    root = spans.root_of_run(run, "flow")
    assert is_trace(root)
    spans.run(root, run, "flow", 1.0, 2.0, None, {})
    (span,) = exported.get_finished_spans()
    assert (span.parent, Spans.trace_of(trace.NonRecordingSpan(span.context))[:52]) == (None, root[:52])
    unsampled = Spans(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    assert unsampled.root_of_run(run, "flow") == below(root, run_span(run))[:53] + "00"


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
    ],
)
def test_the_standard_variables_decide_whether_spans_are_exported(
    given: dict[str, str], is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert exporting() == is_on


@pytest.mark.slow
def test_a_missing_extra_is_reported_once_and_work_continues() -> None:
    program = """
import logging, sys
sys.modules["opentelemetry"] = None
logging.basicConfig()
from orchestrator.tracing.entry import begin_tracing, sending
assert begin_tracing("worker") is None
with sending("enqueue", "job") as sent:
    sent.created(bytes(16))
print([name for name, found in sys.modules.items() if found and name.startswith("opentelemetry.")])
"""
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert done.stderr.count("pip install 'durable-orchestrator[otel]'") == 1
