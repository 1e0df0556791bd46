"""Tasks that a Ray cluster runs as jobs, over the HTTP API of Ray Jobs.

The id of the job is the name of the execution, so Ray refuses a second one. A job belongs to the cluster and not to who
submitted it: any worker that knows its name finds it. The function's result is the last line of the job's log.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from orchestrator.domain.executors.execution import Broken, Execution, Outcome
from orchestrator.domain.executors.ray import LARGEST_INPUT, Ray, failure, input_size, is_over, split_log, submission
from orchestrator.errors import GiveUp
from orchestrator.settings import Settings
from orchestrator.workers.executors.asking import Answer, TooLarge
from orchestrator.workers.executors.looking import Looks
from orchestrator.workers.executors.outputs import finished
from orchestrator.workers.executors.protocol import Gone, Unequipped, Unreachable, Watcher
from orchestrator.workers.executors.rest import Api

_EVERY = 1.0
"""Seconds between two looks."""
_EACH = 8
"""Up to so many jobs are asked for one by one, and more by a list of all that the cluster knows."""
_SETTLED = 2.0
"""Seconds after its end in which Ray writes down once more that a job is over, also one that was deleted by then."""
_LOG_TRIES = 5
_LOG_PAUSE = 2.0
_LOG_LINES = 1_000
"""Of which the last are told."""
_TOKEN = "RAY_AUTH_TOKEN"
_MAY_PASS = (401, 403, 404, 408, 429)
_TAKEN = b"already exists"
_UNKNOWN = b"does not exist"

Found = Mapping[str, Any]


class RayExecutor:
    """Submits jobs to Ray clusters, and looks after them."""

    options: ClassVar[type[Ray]] = Ray

    def __init__(self, settings: Settings | None = None) -> None:
        self._timeout = (settings or Settings()).executor_timeout
        self._clusters: dict[str, _Cluster] = {}

    async def submit(self, execution: Execution) -> str:
        """Submit a job under the execution's name, unless that was done."""
        cluster, options = self._cluster(execution), cast(Ray, execution.options)
        if (size := input_size(execution)) > LARGEST_INPUT:
            raise GiveUp(
                f"The input of {execution.task} has {size:,} bytes, and a job of Ray takes {LARGEST_INPUT:,}: pass the "
                f"place where it is."
            )
        answer = await cluster.api.ask("POST", "/api/jobs/", body=submission(execution, options, _program()))
        if answer.status != 200 and _TAKEN not in answer.body:
            raise _refusal(answer, f"run {options.function}")
        return execution.name

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return how the job ended; its log is told then."""
        cluster = self._cluster(execution)
        while (found := await cluster.looks.next(external_id)) is not None and not is_over(found):
            pass
        if found is None:
            raise Gone(f"Ray does not know the job {external_id} any more: the cluster's head was restarted.")
        if found.get("status") == "STOPPED":
            raise Gone(f"Somebody has stopped the job {external_id} at Ray.")
        text = await cluster.log(external_id)
        if isinstance(text, Broken):
            return text if found.get("status") == "SUCCEEDED" else failure(found)
        lines, end = split_log(text, external_id)
        if lines:
            watcher.log("\n".join(lines[-_LOG_LINES:]))
        return failure(found) if end is None else _outcome(end)

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Stop the job, return when it has ended, and let the cluster forget it."""
        cluster, name, was_there = self._cluster(execution), execution.name, False
        while (found := await cluster.looks.next(name)) is not None and not is_over(found):
            answer = await cluster.api.ask("POST", f"/api/jobs/{name}/stop")
            if answer.status != 200 and not _is_unknown(answer):
                raise _refusal(answer, f"stop the job {name}")
            was_there = True
        if was_there:
            await asyncio.sleep(_SETTLED)
        if found is not None:
            await self.release(execution, name)

    async def release(self, execution: Execution, external_id: str) -> None:
        """Let the cluster forget the job."""
        answer = await self._cluster(execution).api.ask("DELETE", f"/api/jobs/{external_id}")
        if answer.status != 200 and not _is_unknown(answer):
            raise _refusal(answer, f"delete the job {external_id}")

    async def close(self) -> None:
        """Look no more; jobs go on."""
        for cluster in self._clusters.values():
            await cluster.looks.close()
        self._clusters.clear()

    def _cluster(self, execution: Execution) -> _Cluster:
        variable = cast(Ray, execution.options).address_variable
        if variable not in self._clusters:
            url = os.environ.get(variable, "")
            if not url.startswith(("http://", "https://")):
                raise Unequipped(
                    f"Task {execution.task} is for a Ray cluster that this worker does not know: set {variable} in its "
                    f"environment to the address of its Jobs API, such as http://head:8265."
                )
            self._clusters[variable] = _Cluster(url.rstrip("/"), self._timeout)
        return self._clusters[variable]


class _Cluster:
    """One cluster, and what becomes of its jobs."""

    def __init__(self, url: str, timeout: float) -> None:
        token = os.environ.get(_TOKEN, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.api = Api(url=url, headers=headers, timeout=timeout)
        self.looks: Looks[Found] = Looks(self._look, _EVERY)

    async def log(self, name: str) -> str | Broken:
        """Return all that a job has written, or why that cannot be read."""
        for number in range(_LOG_TRIES):
            if number:
                await asyncio.sleep(_LOG_PAUSE)
            try:
                answer = await self.api.ask("GET", f"/api/jobs/{name}/logs")
            except TooLarge as error:
                return Broken(
                    "LogTooLarge", f"Its result stands at the end of its log, which is too long: {error}.", False
                )
            if answer.status == 200 and isinstance(answer.data, dict):
                return str(answer.data.get("logs", ""))
        said = f"status {answer.status}"
        return Broken(
            "ResultLost", f"Its result stands in its log, which Ray cannot read, as its node is gone: {said}."
        )

    async def _look(self, wanted: Collection[str]) -> Mapping[str, Found]:
        if len(wanted) <= _EACH:
            answers = await asyncio.gather(*(self.api.ask("GET", f"/api/jobs/{name}") for name in wanted))
            asked = zip(wanted, answers, strict=True)
            return {name: _read(answer) for name, answer in asked if not _is_unknown(answer)}
        jobs = _read(await self.api.ask("GET", "/api/jobs/"))
        return {str(job["submission_id"]): job for job in jobs if job.get("submission_id") in wanted}


def _is_unknown(answer: Answer) -> bool:
    """Say whether there is no such job; while the head of a cluster starts, it knows no such address either."""
    return answer.status == 404 and _UNKNOWN in answer.body


def _read(answer: Answer) -> Any:
    if answer.status != 200 or answer.data is None:
        raise _refusal(answer, "say what becomes of its jobs")
    return answer.data


def _refusal(answer: Answer, what: str) -> Exception:
    said = answer.body.decode(errors="replace").strip().splitlines()
    text = f"Ray does not {what}: status {answer.status}{f', {said[-1][:500]}' if said else ''}"
    return Unreachable(text) if answer.status in _MAY_PASS or answer.status >= 500 else GiveUp(f"{text}.")


def _outcome(end: Mapping[str, Any]) -> Outcome:
    if "unreadable" in end:
        why = f"The work is done, but its result is no plain data: {end['unreadable']}."
        return Broken("UnreadableOutput", why, False)
    if "kind" in end:
        return Broken(str(end["kind"]), str(end.get("message", "")), detail=str(end.get("detail", "")))
    return finished(end.get("output"))


@cache
def _program() -> str:
    return Path(__file__).with_name("ray_side.py").read_text(encoding="utf-8")
