"""The part of Google's APIs that Cloud Run jobs need, on this machine: version 2 of run.googleapis.com, and tokens.

Jobs that are given a program run it as a process; those that are not end at once, or are held.

What is sent is held against the fields that the published API has: another one, or a value of another type, is refused.
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


def check(schema: Any, value: Any, place: str = "$") -> None:
    """Refuse what the published API does not have."""
    if isinstance(schema, list):
        assert isinstance(value, list), place
        for item in value:
            check(schema[0], item, f"{place}[]")
    elif isinstance(schema, dict):
        for name, item in value.items():
            assert name in schema, f'Unknown name "{name}" at {place}'
            check(schema[name], item, f"{place}.{name}")
    else:
        assert isinstance(value, schema), place
    if place.endswith(".timeout"):
        assert re.fullmatch(r"\d+(\.\d{1,9})?s", value), place


class FakeCloudRun(http.server.ThreadingHTTPServer):
    """Google, for jobs called `quick`, `report`, `failing` and `holding`, and those that have a program."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, programs: dict[str, list[str]] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.executions: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.troubles: list[tuple[int, dict[str, str]]] = []
        """Answers that are given before anything is done."""
        self.lost_answers = 0
        """Runs that are begun, and of which the answer is lost."""
        self.programs = programs or {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cancelled: set[str] = set()
        self.claims: list[dict[str, Any]] = []
        self.tokens = 0
        """How many were given."""
        self.revoked = 0
        """How many of these, the first ones, are refused."""
        self.refused = 0
        """Requests that came with another one."""
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
        said = body["overrides"]
        name = f"{job}/executions/{short}-{uuid.uuid4().hex[:5]}"
        execution = {
            "name": name,
            "createTime": "2024-01-31T09:30:00Z",
            "logUri": f"https://console.example/{name}",
            "taskCount": said.get("taskCount", 1),
            "template": {"timeout": said.get("timeout"), "containers": said["containerOverrides"]},
        }
        with self.lock:
            self.executions = {name: execution, **self.executions}  # the newest first
        if short in self.programs:
            self._start(name, self.programs[short], said["containerOverrides"][0]["env"])
        elif short != "holding":
            self.end(name, succeeded=short != "failing")
        return {"name": f"{job}/operations/1", "metadata": {"@type": "Execution", "name": name}, "done": False}

    def _start(self, name: str, program: list[str], variables: list[dict[str, str]]) -> None:
        environ = {**os.environ, **{one["name"]: one["value"] for one in variables}}
        process = subprocess.Popen(program, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)
        self._processes[name] = process
        threading.Thread(target=self._wait, args=(name, process), daemon=True).start()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self.lock:
            if name in self.executions:
                self.end(name, succeeded=code == 0, cancelled=name in self._cancelled)

    def kill(self, name: str) -> None:
        """End the process of an execution at once."""
        self._signal(name, signal.SIGKILL)
        self._processes[name].wait()

    def _signal(self, name: str, number: signal.Signals) -> None:
        if self._processes[name].poll() is None:  # else its number may be another's by now
            os.killpg(self._processes[name].pid, number)

    def lose(self, name: str) -> None:
        """Forget an execution, and end its process."""
        with self.lock:
            del self.executions[name]
        self.kill(name)

    def cancel(self, name: str) -> None:
        """Have an execution end: a process is told to."""
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
            self._give_token()
        elif parts.path == "/token":
            form = {name: value for name, [value] in parse_qs(body.decode()).items()}
            claim = form["assertion"].split(".")[1]
            server.claims.append(json.loads(base64.urlsafe_b64decode(claim + "=" * (-len(claim) % 4))))
            self._give_token()
        elif self.headers.get("Authorization") not in {
            f"Bearer token-{place + 1}" for place in range(server.revoked, server.tokens)
        }:
            server.refused += 1
            self._send(401, {"error": {"message": "Request had invalid authentication credentials."}})
        else:
            server.requests.append((self.command, parts.path))
            if server.troubles:
                status, headers = server.troubles.pop(0)
                self._send(status, {"error": {"message": "busy"}}, headers)
            else:
                self._answer(parts.path, query, json.loads(body) if body else {})

    def _give_token(self) -> None:
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
            items = [one for name, one in list(server.executions.items()) if name.startswith(f"{found['job']}/")]
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
