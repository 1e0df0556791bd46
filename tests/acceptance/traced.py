"""An application with tasks that appear in a trace. As a program, it calls them inside a span."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from orchestrator import Orchestrator, Retry, TaskContext, WorkflowContext
from orchestrator.trace_context import current_trace

app = Orchestrator()
log = logging.getLogger("traced")


def own_span(name: str) -> None:
    from opentelemetry import trace

    with trace.get_tracer("shop").start_as_current_span(name):
        pass


@app.task(queue="other")
def inner(word: str) -> str | None:
    own_span("work of inner")
    return current_trace()


@app.task
def outer(word: str) -> str:
    log.warning("outer was called")
    return str(inner.enqueue(word).id)


@app.task(retries=Retry(max=2, base=0.01))
def fails_once(ctx: TaskContext, word: str) -> None:
    if ctx.attempt == 1:
        raise ValueError(word)


@app.task(isolation="process")
def apart(word: str) -> None:
    own_span("work apart")


@app.task
async def step(word: str = "", **_: object) -> str:
    own_span("work of step")
    return word


@app.workflow
async def flow(ctx: WorkflowContext, word: str) -> str:
    return await step.schedule(word)


@app.task
def passes_on() -> list[str | None]:
    """Return the trace, and the loaded exporter modules (redis-py itself loads other OpenTelemetry modules)."""
    loaded = [name for name in sys.modules if name.startswith(("opentelemetry.exporter", "orchestrator.tracing.spans"))]
    tells.options(on_success=True).enqueue()
    return [current_trace(), *loaded]


@app.task
def tells() -> str | None:
    return current_trace()


@app.schedule(every="1s", overlap="allow")
@app.task
def beats() -> None:
    pass


def call(secret: str) -> dict[str, str]:
    """Call everything inside one span, as a program with its own OpenTelemetry setup."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "caller"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("shop").start_as_current_span("request") as span:
        handles: dict[str, Any] = {
            "outer": outer.enqueue(secret),
            "fails_once": fails_once.enqueue(secret),
            "apart": apart.enqueue(secret),
            "follows": step.options(on_success=step).enqueue(secret),
        }
        runs: dict[str, Any] = {
            "steps": app.workflows["steps"].start(),
            "flow": flow.start(secret),
            "many": app.start_many(step, [secret, secret]),
        }
        context = span.get_span_context()
    for handle in handles.values():
        handle.result(timeout=60)
    runs["steps"].results(timeout=60)
    runs["flow"].result(timeout=60)
    runs["many"].results(timeout=60)
    provider.shutdown()
    ids = {name: str(handle.id) for name, handle in {**handles, **runs}.items()}
    return {"trace": f"{context.trace_id:032x}", "span": f"{context.span_id:016x}", **ids}


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120  # workers import `traced` from here
    import traced

    print(json.dumps(traced.call(sys.argv[1])))
