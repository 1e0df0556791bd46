"""A client of the pull protocol, for its conformance suite; the variable BROKEN names a rule to violate."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

BROKEN = os.environ.get("BROKEN", "")
stopping = threading.Event()


def ask(action: str, timeout: float = 60, **body: Any) -> tuple[int, Any, float]:
    """Send a request; return the status (0 without a response), the body, and the seconds to wait before a retry."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['ORCHESTRATOR_API_KEY']}"}
    request = Request(f"{os.environ['ORCHESTRATOR_API_URL']}/queue/{action}", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=timeout) as response:
            return response.status, json.loads(response.read() or b"null"), 0
    except HTTPError as error:
        return error.code, None, float(error.headers.get("Retry-After") or 1)
    except (OSError, HTTPException):
        return 0, None, 1


class Job:
    """A leased piece of work."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.work = work
        self.lease = {"queue_id": work["queue_id"]}
        self.progress: dict[str, Any] = {}
        self.stopped = threading.Event()
        self.ended = threading.Event()

    def outcome(self) -> dict[str, Any]:
        task_input = self.work["input"]
        match task_input["do"]:
            case "return":
                return {"result": task_input["value"]}
            case "large":
                return {"result": "x" * task_input["bytes"]}
            case "fail":
                return {"error": {name: task_input[name] for name in task_input if name not in ("do", "id")}}
            case "log":
                return {"logs": task_input["lines"] if BROKEN != "logs" else task_input["lines"][::-1]}
            case "progress":
                self.progress = {"progress": {"fraction": task_input["fraction"], "text": task_input["text"]}}
        self.stopped.wait(task_input["seconds"])
        return {"result": self.work["attempt"]}

    def beat(self) -> None:
        while not self.ended.wait(self.work["lease"] / 3):
            status, _, _ = ask("heartbeat", self.work["lease"] / 3, **self.lease, **self.progress)
            if status in (404, 409) and BROKEN != "cancel":
                return self.stopped.set()

    def perform(self) -> None:
        if BROKEN != "heartbeat":
            threading.Thread(target=self.beat, daemon=True).start()
        report = self.outcome()
        while not self.stopped.is_set():
            status, _, pause = ask("complete", **self.lease, **report)
            if status in (200, 404, 409) or BROKEN == "complete":
                break
            if status in (400, 413, 422):
                report = {"error": f"The API refused the result: {status}"}
            else:
                time.sleep(pause)
        self.ended.set()


def slot(jobs: set[Job]) -> None:
    while not stopping.is_set():
        status, work, pause = ask("poll", worker_id=f"python-{os.getpid()}", services=["conformance"], wait=2)
        if status in (401, 403):
            os._exit(1)
        if status == 200:
            job = Job(work)
            jobs.add(job)
            job.perform()
            jobs.discard(job)
        elif status != 204 and BROKEN != "pause":
            stopping.wait(pause)


def main() -> None:
    if BROKEN != "sigterm":
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    jobs: set[Job] = set()
    slots = [
        threading.Thread(target=slot, args=[jobs], daemon=True)
        for _ in range(int(os.environ["CONFORMANCE_CONCURRENCY"]))
    ]
    for thread in slots:
        thread.start()
    while not stopping.wait(0.1):
        pass
    deadline = time.monotonic() + float(os.environ["CONFORMANCE_DRAIN"])
    for thread in slots:
        thread.join(max(0.0, deadline - time.monotonic()))
    for job in list(jobs):
        job.stopped.set()
        ask("return", **job.lease)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
