"""Tasks that a Ray cluster runs as jobs, over the HTTP API of Ray Jobs.

The id of the job is the name of the execution, so Ray refuses a second one. A job belongs to the cluster and not to its
submitter: any worker that knows its name finds it. The function's result is the last line of the job's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec

from orchestrator.domain.executors.options import Broken, Execution, Outcome
from orchestrator.errors import GiveUp
from orchestrator.plugins.executors.ray import EXECUTION, PROGRAM, SPECIFICATION, Ray
from orchestrator.workers.executors.asking import Answer, TooLarge
from orchestrator.workers.executors.protocol import Gone, Looks, Setup, Unequipped, Watcher, function_outcome
from orchestrator.workers.executors.rest import Api, refusal

LARGEST_INPUT = 100_000
"""Bytes; Linux takes no variable of more than 128 KiB, and Ray passes it on inside of another one."""
_END = "orchestrator-end"
"""Begins the line of a job's log that says how the function ended."""
_START = f'import os; exec(os.environ["{PROGRAM}"])'
_OVER = ("SUCCEEDED", "FAILED", "STOPPED")
_EVERY = 1.0
"""Seconds between two looks."""
_EACH = 8
"""Up to so many jobs are asked for one by one, and more by a list of all that the cluster knows."""
_SETTLED = 2.0
"""Seconds after its end in which Ray writes down once more that a job is over, also one that was deleted by then."""
_LOG_TRIES = 5
_LOG_PAUSE = 2.0
_LOG_LINES = 1_000
"""Lines of which the last are logged."""
_TOKEN = "RAY_AUTH_TOKEN"
_MAY_PASS = (401, 403, 404, 408, 429)
_TAKEN = b"already exists"
_UNKNOWN = b"does not exist"

Found = Mapping[str, Any]


class RayExecutor:
    """Submits jobs to Ray clusters, and looks after them."""

    options: ClassVar[type[Ray]] = Ray

    def __init__(self, setup: Setup) -> None:
        self._timeout = setup.settings.executor_timeout
        self._clusters: dict[str, _Cluster] = {}

    async def submit(self, execution: Execution) -> str:
        """Submit a job under the execution's name, unless that was done."""
        cluster, options = self._cluster(execution), cast(Ray, execution.options)
        if (size := _input_size(execution)) > LARGEST_INPUT:
            raise GiveUp(
                f"The input of {execution.task} has {size:,} bytes, and a job of Ray takes {LARGEST_INPUT:,}: pass the "
                f"place where it is."
            )
        answer = await cluster.api.ask("POST", "/api/jobs/", body=_submission(execution, options, _program()))
        if answer.status != 200 and _TAKEN not in answer.body:
            raise _refusal(answer, f"run {options.function}")
        return execution.name

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return how the job ended; its log is passed on then."""
        cluster = self._cluster(execution)
        while (found := await cluster.looks.next(external_id)) is not None and not _is_over(found):
            pass
        if found is None:
            raise Gone(f"Ray does not know the job {external_id} any more: the cluster's head was restarted.")
        if found.get("status") == "STOPPED":
            raise Gone(f"Somebody has stopped the job {external_id} at Ray.")
        text = await cluster.log(external_id)
        if isinstance(text, Broken):
            return text if found.get("status") == "SUCCEEDED" else _failure(found)
        lines, end = split_log(text, external_id)
        if lines:
            watcher.log("\n".join(lines[-_LOG_LINES:]))
        return _failure(found) if end is None else function_outcome(end, end.get("output"))

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Stop the job, return when it has ended, and let the cluster forget it."""
        cluster, name, was_there = self._cluster(execution), execution.name, False
        while (found := await cluster.looks.next(name)) is not None and not _is_over(found):
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
    return refusal(answer, f"Ray does not {what}", said[-1][:500] if said else "", _MAY_PASS)


@cache
def _program() -> str:
    return Path(__file__).with_name("on_cluster.py").read_text(encoding="utf-8")


def _submission(execution: Execution, options: Ray, program: str) -> dict[str, Any]:
    """Return what Ray is asked to run; the program, which has nothing of ours, calls the function."""
    own = {SPECIFICATION: execution.specification.decode(), EXECUTION: execution.name, PROGRAM: program}
    said: dict[str, Any] = {
        "submission_id": execution.name,
        "entrypoint": shlex.join([options.python, "-c", _START, options.function]),
        "runtime_env": {**options.runtime_env, "env_vars": {**options.runtime_env.get("env_vars", {}), **own}},
        "metadata": {"task": execution.task, "task_id": execution.task_id, "attempt": str(execution.attempt)},
    }
    reserved = {
        "entrypoint_num_cpus": options.cpus,
        "entrypoint_num_gpus": options.gpus,
        "entrypoint_memory": options.memory,
        "entrypoint_resources": options.resources,
    }
    return said | {name: amount for name, amount in reserved.items() if amount}


def _input_size(execution: Execution) -> int:
    """Return how much of a variable the input takes, as Ray passes it on."""
    return len(json.dumps(execution.specification.decode()))


def _is_over(found: Mapping[str, Any]) -> bool:
    return found.get("status") in _OVER


def split_log(text: str, name: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return the lines of a job's log, and what its last word says, if it came to that."""
    lines = text.splitlines()
    mark = f"{_END} {name} "
    last = next((place for place in reversed(range(len(lines))) if lines[place].startswith(mark)), None)
    if last is None:
        return lines, None
    try:
        end = msgspec.json.decode(lines[last][len(mark) :], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return lines, None
    return lines[:last], end


def _failure(found: Mapping[str, Any]) -> Outcome:
    """Return how a job failed whose function did not come to say anything."""
    said = str(found.get("message") or "and Ray does not say why")
    first, _, rest = said.partition("\n")
    kind = "".join(word.capitalize() for word in str(found.get("error_type") or "job_failed").split("_"))
    return Broken(kind, f"The job failed at Ray: {first}", detail=rest)
