"""The part of Ray's HTTP API that jobs need, on this machine; a job is a process.

It answers as Ray 2 does: texts that our executor goes by are Ray's own. test_executor_ray.py runs on a real cluster.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

_PATH = re.compile(r"/api/jobs/(?:(?P<name>[^/]+)(?:/(?P<what>logs|stop))?)?")
_SUBMISSION = {"submission_id", "entrypoint", "runtime_env", "metadata"}
_RESERVED = {"entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory", "entrypoint_resources"}


class _Job:
    def __init__(self, said: dict[str, Any], log: Path) -> None:
        self.said = said
        self.log = log
        self.is_stopped = False
        environ = {**os.environ, **said["runtime_env"]["env_vars"]}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                said["entrypoint"], shell=True, env=environ, stdout=out, stderr=out, start_new_session=True
            )

    def shown(self) -> dict[str, Any]:
        """Return the job as Ray shows it."""
        code = self.process.poll()
        status = "RUNNING" if code is None else "STOPPED" if self.is_stopped else "FAILED" if code else "SUCCEEDED"
        message = f"Job entrypoint command failed with exit code {code}" if status == "FAILED" else status.lower()
        said = {name: self.said[name] for name in ("submission_id", "entrypoint", "metadata", "runtime_env")}
        error = {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"} if status == "FAILED" else {}
        return {**said, "type": "SUBMISSION", "status": status, "message": message, **error}

    def end(self, number: signal.Signals) -> None:
        if self.process.poll() is None:  # else its number may be another's by now
            os.killpg(self.process.pid, number)


class FakeRay(http.server.ThreadingHTTPServer):
    """The head of a cluster."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, _Job] = {}
        self.lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="fake-ray-")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None: ...

    def submit(self, said: dict[str, Any]) -> bool:
        """Begin a job; return whether there was none of that name."""
        assert said.keys() <= _SUBMISSION | _RESERVED, said.keys()
        name = said["submission_id"]
        with self.lock:
            if name in self.jobs:
                return False
            self.jobs[name] = _Job(said, Path(self._folder.name, name))
            return True

    def lose(self, name: str) -> None:
        """Forget a job, and end it."""
        with self.lock:
            job = self.jobs.pop(name)
        job.end(signal.SIGKILL)
        job.process.wait()

    def stop(self) -> None:
        for name in list(self.jobs):
            self.lose(name)
        self.shutdown()
        self.server_close()
        self._folder.cleanup()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeRay

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None: ...

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = _PATH.fullmatch(self.path)
        if found is None:
            self._send(404, "404: Not Found")
        elif found["name"] is None:
            self._serve_all(body)
        elif (job := self.server.jobs.get(found["name"])) is None:
            self._send(404, f"Job {found['name']} does not exist")
        else:
            self._serve_one(job, found["what"])

    def _serve_all(self, body: bytes) -> None:
        if self.command == "POST":
            said = json.loads(body)
            if self.server.submit(said):
                self._send(200, {"submission_id": said["submission_id"], "job_id": said["submission_id"]})
            else:
                self._send(500, f"ValueError: Job with submission_id {said['submission_id']} already exists.")
        else:
            self._send(200, [job.shown() for job in list(self.server.jobs.values())])

    def _serve_one(self, job: _Job, what: str | None) -> None:
        if what == "logs":
            self._send(200, {"logs": job.log.read_text(encoding="utf-8", errors="replace")})
        elif what == "stop":
            is_running = job.process.poll() is None
            job.is_stopped = job.is_stopped or is_running
            job.end(signal.SIGTERM)
            self._send(200, {"stopped": is_running})
        elif self.command == "DELETE":
            if job.process.poll() is None:
                self._send(500, "Job is still running: stop it before it is deleted.")
                return
            self.server.jobs.pop(job.said["submission_id"], None)
            self._send(200, {"deleted": True})
        else:
            self._send(200, job.shown())

    def _send(self, status: int, said: Any) -> None:
        data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
