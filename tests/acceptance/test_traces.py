"""Traces from the caller's span through the scheduler to the workers, as a receiver of OTLP gets them."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from orchestrator.sdk.values.payload import decode_value
from orchestrator.trace_context import attempt_span, run_span
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import HERE, Stack
from tests.waiting import eventually

SECRET = "geheimnisvoll"
STEPS = """
name: steps
tasks:
  first: {task: traced.step}
  second: {task: traced.step, depends_on: [first]}
"""


class Span(NamedTuple):
    """A received span, with the service that sent it."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    instance: str
    links: list[str]
    attributes: dict[str, Any]
    error: bool
    began: int
    ended: int


class Receiver:
    """Receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.name,
                            about["service.name"],
                            about.get("service.instance.id", ""),
                            [link.span_id.hex() for link in span.links],
                            {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes},
                            span.status.code == 2,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                        )
                    )

    def named(self, name: str, trace: str | None = None) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name and trace in (None, span.trace)]

    def of(self, identifier: str, name: str) -> list[Span]:
        """Return one task's or run's spans of a name, in order."""
        keys = ("messaging.message.id", "orchestrator.run.id")
        found = [span for span in self.named(name) if identifier in [span.attributes.get(key) for key in keys]]
        return sorted(found, key=lambda span: span.began)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def observed(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[Stack]:
    """A scheduler and two workers that export spans; each worker serves its own queue."""
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "ORCHESTRATOR_LOG_FORMAT": "json",
        }
        stack.scheduler()
        for queue in ("default", "other"):
            stack.worker("--app", "traced:app", "--queues", queue, wait=False)
        for process in stack.processes[-2:]:
            eventually(lambda process=process: process.logged("process.ready"), f"worker ready, see {process.log}")  # type: ignore[misc]
        definition = stack.folder / "steps.yaml"
        definition.write_text(STEPS)
        command(stack, "workflows", "apply", str(definition))
        yield stack


def command(stack: Stack, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=HERE,
        env=stack.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(stack: Stack, **environment: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "traced.py"), SECRET],
        env={**stack.environment, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def called(observed: Stack, receiver: Receiver) -> dict[str, str]:
    """The ids of the calls in `traced.py`, once all their spans have arrived."""
    found = call(observed)
    many = {"run traced.fails_once": 2, "dispatch traced.fails_once": 2, "run traced.step": 7, "turn traced.flow": 2}
    once = ("run traced.outer", "dispatch traced.outer", "enqueue traced.inner", "run traced.inner", "run traced.apart")
    for name, spans in (dict.fromkeys(once, 1) | many).items():
        eventually(lambda name=name, spans=spans: len(receiver.named(name)) >= spans, f"spans {name}")  # type: ignore[misc]
    for name in ("workflow steps", "workflow traced.flow", "workflow run of many", "work apart", "work of inner"):
        eventually(lambda name=name: receiver.named(name), f"a span {name}")  # type: ignore[misc]
    return found


def test_one_trace_covers_the_caller_the_scheduler_and_two_workers(called: dict[str, str], receiver: Receiver) -> None:
    trace = called["trace"]
    (request,) = receiver.named("request")
    (sent,) = receiver.of(called["outer"], "enqueue traced.outer")
    (handed_out,) = receiver.of(called["outer"], "dispatch traced.outer")
    (ran,) = receiver.of(called["outer"], "run traced.outer")
    (sent_on,) = receiver.named("enqueue traced.inner")
    (inner,) = receiver.named("run traced.inner")
    (own,) = receiver.named("work of inner")
    assert {span.trace for span in (request, sent, handed_out, ran, sent_on, inner, own)} == {trace}
    assert [span.parent for span in (request, sent, handed_out, ran)] == ["", request.id, sent.id, sent.id]
    assert [span.parent for span in (sent_on, inner, own)] == [ran.id, sent_on.id, inner.id]
    services = [span.service for span in (request, handed_out, ran, inner)]
    assert services == ["caller", "orchestrator-scheduler", "orchestrator-worker", "orchestrator-worker"]
    assert ran.instance != inner.instance
    assert sent.began <= handed_out.began <= handed_out.ended
    assert ran.attributes["messaging.destination.name"] == "default"
    assert inner.attributes["messaging.destination.name"] == "other"


def test_a_retry_links_to_the_previous_attempt(called: dict[str, str], receiver: Receiver) -> None:
    first, second = receiver.of(called["fails_once"], "run traced.fails_once")
    assert (first.links, second.links) == ([], [first.id])
    assert first.parent == second.parent == receiver.of(called["fails_once"], "enqueue traced.fails_once")[0].id
    assert (first.error, first.attributes["error.type"]) == (True, "ValueError")
    assert not second.error
    assert len(receiver.of(called["fails_once"], "dispatch traced.fails_once")) == 2
    task = bytes.fromhex(called["fails_once"].replace("-", ""))
    assert first.id == attempt_span(task, 1)


def test_spans_of_an_isolated_task_have_its_attempt_as_parent(called: dict[str, str], receiver: Receiver) -> None:
    (ran,) = receiver.of(called["apart"], "run traced.apart")
    (own,) = receiver.named("work apart")
    assert (own.trace, own.parent) == (called["trace"], ran.id)


@pytest.mark.parametrize(("run", "name"), [("steps", "steps"), ("flow", "traced.flow")])
def test_tasks_and_turns_of_a_run_are_children_of_its_span(
    called: dict[str, str], receiver: Receiver, run: str, name: str
) -> None:
    (whole,) = receiver.of(called[run], f"workflow {name}")
    (sent,) = receiver.of(called[run], f"start {name}")
    assert (whole.trace, whole.parent) == (called["trace"], sent.id)
    assert whole.id == run_span(bytes.fromhex(called[run].replace("-", "")))
    parts = receiver.of(called[run], "run traced.step")
    assert {(part.trace, part.parent) for part in parts} == {(called["trace"], whole.id)}
    if run == "steps":
        assert [part.attributes["orchestrator.step"] for part in parts] == ["first", "second"]
    else:
        turns = receiver.of(called[run], "turn traced.flow")
        assert len(turns) == 2
        assert all(turn.parent == whole.id and not turn.links for turn in turns)


def test_runs_of_many_tasks_and_callbacks_join_the_trace(called: dict[str, str], receiver: Receiver) -> None:
    (whole,) = receiver.of(called["many"], "workflow run of many")
    assert [span.trace for span in receiver.of(called["many"], "run traced.step")] == [called["trace"]] * 2
    assert whole.trace == called["trace"]
    (first,) = receiver.of(called["follows"], "run traced.step")
    beside = [span for span in receiver.named("run traced.step") if span.parent == first.parent]
    assert len(beside) == 2


def test_spans_contain_no_arguments(called: dict[str, str], receiver: Receiver) -> None:
    assert receiver.bodies
    assert not [body for body in receiver.bodies if SECRET.encode() in body]


def test_log_lines_contain_trace_and_span_ids(called: dict[str, str], observed: Stack, receiver: Receiver) -> None:
    lines = [json.loads(line) for process in observed.processes for line in process.log.read_text().splitlines()]
    (line,) = [line for line in lines if line["message"] == "outer was called"]
    (ran,) = receiver.of(called["outer"], "run traced.outer")
    assert (line["trace_id"], line["span_id"]) == (ran.trace, ran.id)
    assert line["task_id"] == called["outer"]
    about = [line for line in lines if line.get("task_id") == called["fails_once"]]
    assert about
    assert {line["trace_id"] for line in about} == {called["trace"]}


@pytest.fixture(scope="module")
def beats(called: dict[str, str], observed: Stack) -> None:
    """Apply a schedule that fires every second."""
    command(observed, "schedules", "apply", "--app", "traced:app")


@pytest.mark.usefixtures("beats")
def test_a_scheduled_run_is_the_root_of_a_trace(receiver: Receiver) -> None:
    eventually(lambda: receiver.named("run traced.beats"), "it beats")
    eventually(lambda: receiver.named("workflow traced.beats"), "its run has a span")
    whole = receiver.named("workflow traced.beats")[0]
    run = str(whole.attributes["orchestrator.run.id"])
    (part,) = eventually(lambda: receiver.of(run, "run traced.beats"), "what it has come to has one, too")
    assert whole.parent == ""
    assert (part.trace, part.parent) == (whole.trace, whole.id)


@pytest.mark.usefixtures("beats")
def test_an_unsampled_trace_is_propagated_but_not_exported(observed: Stack, receiver: Receiver) -> None:
    found = call(observed, OTEL_TRACES_SAMPLER="always_off")
    inner = (
        "SELECT result FROM orchestrator.ended_tasks WHERE name = 'traced.inner' AND trace LIKE '00-' || :trace || '%'"
    )
    told = eventually(lambda: observed.sql(inner, trace=found["trace"]), "what it has enqueued has ended")
    assert re.fullmatch(f"00-{found['trace']}-[0-9a-f]{{16}}-0[02]", decode_value(bytes(told[0][0])))
    for name in ("run traced.beats", "workflow traced.beats"):  # spans of the unsampled trace would arrive before these
        seen = len(receiver.named(name))
        eventually(lambda name=name, seen=seen: len(receiver.named(name)) > seen + 1, f"later spans {name}")  # type: ignore[misc]
    assert not [span for span in receiver.spans if span.trace == found["trace"]]
