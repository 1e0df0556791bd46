"""A fake of the part of Ray's HTTP API that jobs need; a job is a process.

The messages are those of Ray 2, because the executor parses them. test_executor_ray.py uses a real cluster.
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
    def __init__(self, submission: dict[str, Any], log: Path) -> None:
        self.submission = submission
        self.log = log
        self.is_stopped = False
        environ = {**os.environ, **submission["runtime_env"]["env_vars"]}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                submission["entrypoint"], shell=True, env=environ, stdout=out, stderr=out, start_new_session=True
            )

    def shown(self) -> dict[str, Any]:
        """Return the job as the Ray API returns it."""
        code = self.process.poll()
        status = "RUNNING" if code is None else "STOPPED" if self.is_stopped else "FAILED" if code else "SUCCEEDED"
        message = f"Job entrypoint command failed with exit code {code}" if status == "FAILED" else status.lower()
        submission = {
            name: self.submission[name] for name in ("submission_id", "entrypoint", "metadata", "runtime_env")
        }
        error = {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"} if status == "FAILED" else {}
        return {**submission, "type": "SUBMISSION", "status": status, "message": message, **error}

    def end(self, number: signal.Signals) -> None:
        if self.process.poll() is None:  # the process id of an ended process may be reused
            os.killpg(self.process.pid, number)


class FakeRay(http.server.ThreadingHTTPServer):
    """The head node of a Ray cluster."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, _Job] = {}
        self.lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="fake-ray-")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None: ...

    def submit(self, submission: dict[str, Any]) -> bool:
        """Start a job; return False if the name is taken."""
        assert submission.keys() <= _SUBMISSION | _RESERVED, submission.keys()
        name = submission["submission_id"]
        with self.lock:
            if name in self.jobs:
                return False
            self.jobs[name] = _Job(submission, Path(self._folder.name, name))
            return True

    def lose(self, name: str) -> None:
        """Delete a job and kill its process."""
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
            submission = json.loads(body)
            if self.server.submit(submission):
                self._send(200, {"submission_id": submission["submission_id"], "job_id": submission["submission_id"]})
            else:
                self._send(500, f"ValueError: Job with submission_id {submission['submission_id']} already exists.")
        else:
            self._send(200, [job.shown() for job in list(self.server.jobs.values())])

    def _serve_one(self, job: _Job, action: str | None) -> None:
        if action == "logs":
            self._send(200, {"logs": job.log.read_text(encoding="utf-8", errors="replace")})
        elif action == "stop":
            is_running = job.process.poll() is None
            job.is_stopped = job.is_stopped or is_running
            job.end(signal.SIGTERM)
            self._send(200, {"stopped": is_running})
        elif self.command == "DELETE":
            if job.process.poll() is None:
                self._send(500, "Job is still running: stop it before it is deleted.")
                return
            self.server.jobs.pop(job.submission["submission_id"], None)
            self._send(200, {"deleted": True})
        else:
            self._send(200, job.shown())

    def _send(self, status: int, submission: Any) -> None:
        data = submission.encode() if isinstance(submission, str) else json.dumps(submission).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
