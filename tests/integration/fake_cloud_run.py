"""A fake of the Google APIs that Cloud Run jobs need: version 2 of run.googleapis.com, and tokens.

A job with a program runs it as a process; other jobs end at once, or never (`holding`). Requests are validated against
the fields of the published API: an unknown field, or a value of another type, is rejected.
"""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import signal
import subprocess
import threading
import uuid
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(
    r"/v2/(?P<job>projects/[^/]+/locations/[^/]+/jobs/(?P<short>[^/:]+))"
    r"(?P<rest>:run|/executions(?:/(?P<name>[^/:]+)(?P<verb>:cancel)?)?)"
)
_VARIABLE = {"name": str, "value": str, "valueSource": dict}
_RUN: dict[str, Any] = {
    "validateOnly": bool,
    "etag": str,
    "overrides": {
        "taskCount": int,
        "timeout": str,
        "containerOverrides": [{"name": str, "args": [str], "clearArgs": bool, "env": [_VARIABLE]}],
    },
}


def check(schema: Any, value: Any, path: str = "$") -> None:
    """Fail if a value does not match the published API."""
    if isinstance(schema, list):
        assert isinstance(value, list), path
        for item in value:
            check(schema[0], item, f"{path}[]")
    elif isinstance(schema, dict):
        for name, item in value.items():
            assert name in schema, f'Unknown name "{name}" at {path}'
            check(schema[name], item, f"{path}.{name}")
    else:
        assert isinstance(value, schema), path
    if path.endswith(".timeout"):
        assert re.fullmatch(r"\d+(\.\d{1,9})?s", value), path


class FakeCloudRun(http.server.ThreadingHTTPServer):
    """A Google server with the jobs `quick`, `report`, `failing`, `holding`, and one job for each program."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, programs: dict[str, list[str]] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.executions: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[tuple[int, dict[str, str]]] = []
        """Error responses that are sent before a request is processed."""
        self.lost_answers = 0
        """Number of next `run` requests that start an execution but answer with an error."""
        self.programs = programs or {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cancelled: set[str] = set()
        self.claims: list[dict[str, Any]] = []
        self.tokens = 0
        """Number of tokens issued."""
        self.revoked = 0
        """Number of tokens revoked, the oldest first."""
        self.refused = 0
        """Number of requests with an invalid token."""
        self.page = 500
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        self.shutdown()
        self.server_close()

    def run(self, job: str, short: str, body: dict[str, Any]) -> dict[str, Any]:
        check(_RUN, body)
        overrides = body["overrides"]
        name = f"{job}/executions/{short}-{uuid.uuid4().hex[:5]}"
        execution = {
            "name": name,
            "createTime": "2024-01-31T09:30:00Z",
            "logUri": f"https://console.example/{name}",
            "taskCount": overrides.get("taskCount", 1),
            "template": {"timeout": overrides.get("timeout"), "containers": overrides["containerOverrides"]},
        }
        with self.lock:
            self.executions = {name: execution, **self.executions}  # newest first
        if short in self.programs:
            self._start(name, self.programs[short], overrides["containerOverrides"][0]["env"])
        elif short != "holding":
            self.end(name, succeeded=short != "failing")
        return {"name": f"{job}/operations/1", "metadata": {"@type": "Execution", "name": name}, "done": False}

    def _start(self, name: str, program: list[str], variables: list[dict[str, str]]) -> None:
        environ = {**os.environ, **{variable["name"]: variable["value"] for variable in variables}}
        process = subprocess.Popen(program, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)
        self._processes[name] = process
        threading.Thread(target=self._wait, args=(name, process), daemon=True).start()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self.lock:
            if name in self.executions:
                self.end(name, succeeded=code == 0, cancelled=name in self._cancelled)

    def kill(self, name: str) -> None:
        """Kill the process of an execution."""
        self._signal(name, signal.SIGKILL)
        self._processes[name].wait()

    def _signal(self, name: str, number: signal.Signals) -> None:
        if self._processes[name].poll() is None:  # the process id of an ended process may be reused
            os.killpg(self._processes[name].pid, number)

    def lose(self, name: str) -> None:
        """Delete an execution and kill its process."""
        with self.lock:
            del self.executions[name]
        self.kill(name)

    def cancel(self, name: str) -> None:
        """Cancel an execution; its process, if any, receives SIGTERM."""
        if name in self._processes:
            self._cancelled.add(name)
            self._signal(name, signal.SIGTERM)
        else:
            self.end(name, succeeded=False, cancelled=True)

    def end(self, name: str, *, succeeded: bool = True, cancelled: bool = False) -> None:
        state = "CONDITION_SUCCEEDED" if succeeded else "CONDITION_FAILED"
        self.executions[name] |= {
            "completionTime": "2024-01-31T09:31:00Z",
            "conditions": [{"type": "Completed", "state": state, "message": "" if succeeded else "exit(1)"}],
            "failedCount": int(not succeeded and not cancelled),
            "cancelledCount": int(cancelled),
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeCloudRun

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, format: str, *args: Any) -> None: ...

    def _serve(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        query = {name: value for name, [value] in parse_qs(parts.query).items()}
        server = self.server
        if parts.path.startswith("/computeMetadata/"):
            assert self.headers["Metadata-Flavor"] == "Google"
            self._send_token()
        elif parts.path == "/token":
            form = {name: value for name, [value] in parse_qs(body.decode()).items()}
            claim = form["assertion"].split(".")[1]
            server.claims.append(json.loads(base64.urlsafe_b64decode(claim + "=" * (-len(claim) % 4))))
            self._send_token()
        elif self.headers.get("Authorization") not in {
            f"Bearer token-{number + 1}" for number in range(server.revoked, server.tokens)
        }:
            server.refused += 1
            self._send(401, {"error": {"message": "Request had invalid authentication credentials."}})
        else:
            server.requests.append((self.command, parts.path))
            if server.failures:
                status, headers = server.failures.pop(0)
                self._send(status, {"error": {"message": "busy"}}, headers)
            else:
                self._answer(parts.path, query, json.loads(body) if body else {})

    def _send_token(self) -> None:
        self.server.tokens += 1
        self._send(200, {"access_token": f"token-{self.server.tokens}", "expires_in": 3_600})

    def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> None:
        found, server = _PATH.fullmatch(path), self.server
        if found is None or found["short"] not in ("quick", "report", "failing", "holding", *server.programs):
            self._send(404, {"error": {"message": f"Resource {path} was not found"}})
        elif found["rest"] == ":run":
            answer = server.run(found["job"], found["short"], body)
            if server.lost_answers:
                server.lost_answers -= 1
                self._send(502, {"error": {"message": "bad gateway"}})
            else:
                self._send(200, answer)
        elif found["verb"]:
            assert body == {}
            server.cancel(f"{found['job']}/executions/{found['name']}")
            self._send(200, {"name": "operations/2", "done": False})
        else:
            assert query.keys() <= {"pageSize", "pageToken", "showDeleted"}
            items = [item for name, item in list(server.executions.items()) if name.startswith(f"{found['job']}/")]
            start, size = int(query.get("pageToken", 0)), min(server.page, int(query["pageSize"]))
            more = {"nextPageToken": str(start + size)} if start + size < len(items) else {}
            self._send(200, {"executions": items[start : start + size], **more})

    def _send(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
