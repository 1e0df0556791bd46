"""Flows over HTTP, in the format of the system that they come from, with real services in real processes."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import fresh_stack
from tests.integration.serving import serving
from tests.waiting import eventually

CONFORMANCE = os.environ.get("ORCHESTRATOR_CONFORMANCE")
PARAMS = {"val": 2, "list": [1, 2, 3]}
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str, Any]] = {
    "01_simple_executor": ({}, {}, "final", 6),
    "02_choice_basic": ({}, {}, "result_b", 20),
    "04_parallel_concurrent": ({}, {}, "total", 12),
    "06_foreach_concurrent": ({}, {}, "total", 12),
    "07_timer_wait_event": ({}, {"flag": True}, "result", 2),
    "08_approval": ({"approval": "approved"}, {}, "approved_result", 200),
    "10_full_combo": ({}, {"flag": True}, "end_out", 1000),
}
"""By file: more parameters, the signals to send, and the expected key and value at the end."""


def serve(name: str, given: Any, params: dict[str, Any]) -> Any:
    """Answer as a service."""
    if name == "transform":
        return given * params["mul"] if isinstance(given, (int, float)) else getattr(given, params["op"])()
    return sum(given) if name == "sum" else {"action": params["action"]}


class _Service(http.server.BaseHTTPRequestHandler):
    """Answers `POST /exec/<service>`."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = {"result": serve(self.path.rpartition("/")[2], asked["input"], asked["params"]), "error": ""}
        except Exception as error:  # noqa: BLE001  # errors are answers of the service
            answer = {"result": None, "error": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def services() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys
asked = json.load(sys.stdin)
print(json.dumps([asked["input"], asked["params"]["by"]]))
"""


def ask(base: str, path: str, body: Any = None) -> Any:
    """Send a request as a client of that system does."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def base(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a stack where a worker has registered services."""
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack, services() as url:
        stack.scheduler()
        stack.worker("--allow-command", sys.executable)
        with serving(stack.settings) as address:
            ask(address, "/workers/register", {"id": "w", "url": url, "services": ["transform", "sum", "route"]})
            stop = threading.Event()

            def beat() -> None:
                while not stop.wait(2.0):
                    ask(address, "/workers/heartbeat", {"id": "w", "load": 0})

            beating = threading.Thread(target=beat)
            beating.start()
            yield address
            stop.set()
            beating.join()


def ended(base: str, task: str) -> dict[str, Any] | None:
    found: dict[str, Any] = ask(base, f"/tasks/get?id={task}")
    return found if found["status"] in ("completed", "failed", "canceled") else None


def start(base: str, name: str, definition: str, **params: Any) -> str:
    flow = ask(base, "/flows", {"Name": name})["id"]
    version = {"FlowID": flow, "Version": 1, "DefinitionJSON": definition, "Status": "published"}
    assert ask(base, "/flows/version", version) == {"id": f"{name}@1"}
    task: str = ask(base, "/tasks", {"FlowID": flow, "ParamsJSON": json.dumps(params)})["id"]
    return task


@pytest.mark.skipif(not CONFORMANCE, reason="ORCHESTRATOR_CONFORMANCE is not set: no flows to run")
@pytest.mark.parametrize("file", sorted(Path(CONFORMANCE or ".").glob("flows/*.yaml")), ids=lambda path: path.stem)
def test_conformance_flows_have_their_expected_results(base: str, file: Path) -> None:
    more, signals, key, value = EXPECTED[file.stem]
    task = start(base, file.stem, file.read_text(), **PARAMS, **more)
    for name, sent in signals.items():
        assert ask(base, "/tasks/signal", {"task_id": task, "key": name, "value": sent}) == {"ok": "1"}
    found = eventually(lambda: ended(base, task), "it has ended", 60)
    assert found is not None
    assert (found["status"], json.loads(found["shared_json"])[key]) == ("completed", value), found["error"]
    runs = ask(base, f"/tasks/runs?task_id={task}")
    assert {run["status"] for run in runs} == {"ok"}
    assert all(run["worker_id"] for run in runs if run["prep_json"] == '{"kind":"executor"}')


DEMO = """
start: pick
nodes:
  pick: {service: route, post: {action_key: action}}
  loud: {service: transform, params: {op: upper}, prep: {input_key: $params.text}, post: {output_key: said}}
  quiet: {service: transform, params: {op: lower}, prep: {input_key: $params.text}, post: {output_key: said}}
edges:
- {from: pick, action: loud, to: loud}
- {from: pick, action: quiet, to: quiet}
- {from: loud, to: ""}
"""


def test_flows_branch_fail_with_their_services_and_can_be_cancelled(base: str) -> None:
    tasks = {
        result: start(base, "demo", DEMO, text="Hi", action=action)
        for action, result in (("loud", "HI"), ("quiet", "hi"))
    }
    lost = '{"start": "a", "nodes": {"a": {"service": "nowhere", "max_attempts": 2, "attempt_delay_ms": 50}}}'
    wrong = '{"start": "a", "nodes": {"a": {"service": "sum", "prep": {"input_key": "$params.val"}, "max_retries": 1}}}'
    waits = '{"start": "a", "nodes": {"a": {"kind": "approval"}}}'
    missing, failing, waiting = (
        start(base, name, text, val=1) for name, text in (("lost", lost), ("wrong", wrong), ("waits", waits))
    )
    for result, task in tasks.items():
        found = eventually(lambda task=task: ended(base, task), "it has ended")  # type: ignore[misc]
        assert (found["status"], found["shared"]["said"]) == ("completed", result)
    found = eventually(lambda: ended(base, failing), "it has failed")
    assert found is not None
    assert "TypeError" in found["error"]
    runs = ask(base, f"/tasks/runs?task_id={failing}")
    assert [(run["attempt_no"], run["status"]) for run in runs] == [(1, "error"), (2, "error")]
    found = eventually(lambda: ended(base, missing), "it has failed", 60)
    assert found is not None
    assert (found["status"], "nowhere" in found["error"]) == ("failed", True)
    assert waiting in {task["id"] for task in ask(base, "/tasks?status=running")}
    ask(base, f"/tasks/cancel?id={waiting}", {})
    found = eventually(lambda: ended(base, waiting), "it is cancelled")
    assert found is not None
    assert found["status"] == "canceled"
    assert [task["id"] for task in ask(base, "/tasks?status=canceled")] == [waiting]


def script(**more: Any) -> dict[str, Any]:
    """Return an executor whose command prints its input and its parameter `by`."""
    return {"exec_type": "local_script", "script": {"cmd": sys.executable, "args": ["-c", SCRIPT]}, **more}


@contextmanager
def pulling(base: str) -> Iterator[list[dict[str, Any]]]:
    """Poll and complete the work of the service `behind`, like a client behind a firewall; yield this work."""
    done: list[dict[str, Any]] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            asked = {"worker_id": "far", "services": ["behind"], "wait": 1}
            request = urllib.request.Request(
                base + "/queue/poll", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                found = json.load(answer) if answer.status == 200 else None
            if found is not None:
                done.append(found)
                error = "no" if found["params"]["by"] == "nobody" else ""
                result = None if error else [found["input"], found["params"]["by"]]
                ask(base, "/queue/complete", {"queue_id": found["queue_id"], "result": result, "error": error})

    thread = threading.Thread(target=work)
    thread.start()
    yield done
    stop.set()
    thread.join()


def test_scripts_and_pull_clients_run_nodes_branches_items_and_subflow_nodes(base: str) -> None:
    """Each kind of node sets executors and their parameters by branch, item or sub-node."""
    local = {"exec_type": "local_func", "func": "project.add"}
    behind = {"exec_type": "queue", "service": "behind"}
    at = {"input_key": "$params.val"}
    flow = {
        "start": "script",
        "nodes": {
            "script": script(params={"by": "script"}, prep=at, post={"output_key": "script"}),
            "queue": {**behind, "params": {"by": "queue"}, "prep": at, "post": {"output_key": "queue"}},
            "both": {
                "kind": "parallel",
                "parallel_mode": "concurrent",
                "prep": at,
                "parallel_execs": [
                    script(params={"by": "first"}, prep={"input_key": "$params.list"}, post={"output_key": "first"}),
                    {**behind, "params": {"by": "second"}},
                    {**local, "params": {"a": 3, "b": 4}},
                    {"service": "transform", "params": {"mul": 5}},
                ],
                "post": {"output_key": "both"},
            },
            "each": {
                "kind": "foreach",
                "service": "transform",
                "params": {"mul": 2},
                "prep": {"input_key": "$params.list"},
                "foreach_execs": [script(index=1, params={"by": "item"}), {"index": 2, "params": {"mul": 3}}],
                "post": {"output_key": "each"},
            },
            "inner": {
                "kind": "subflow",
                "subflow": {"start": "a", "nodes": {"a": {"service": "sum", "prep": at, "post": {"output_key": "a"}}}},
                "subflow_execs": [{**behind, "node": "a", "params": {"by": "inner"}}],
                "post": {"output_key": "inner"},
            },
            "refused": {**behind, "params": {"by": "nobody"}},
        },
        "edges": [
            {"from": one, "to": to}
            for one, to in zip(
                ("script", "queue", "both", "each", "inner"), ("queue", "both", "each", "inner", "refused"), strict=True
            )
        ],
    }
    with pulling(base) as done:
        task = start(base, "executors", json.dumps(flow), **PARAMS)
        found = eventually(lambda: ended(base, task), "it has ended", 60)
    assert found is not None
    assert (found["status"], "no" in found["error"]) == ("failed", True), "what was reported for the last is its error"
    shared = found["shared"]
    assert shared["script"] == [2, "script"]
    assert shared["queue"] == [2, "queue"]
    assert shared["first"] == shared["both"][0] == [[1, 2, 3], "first"]
    assert shared["both"][1] == [2, "second"]
    assert shared["both"][2:] == [7, 10]
    assert shared["each"] == [2, [2, "item"], 9]
    assert shared["inner"] == {"a": [2, "inner"]}
    assert [one["params"]["by"] for one in done] == ["queue", "second", "inner", "nobody"]
    assert {one["service"] for one in done} == {"behind"}
