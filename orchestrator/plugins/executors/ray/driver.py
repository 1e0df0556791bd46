"""Tasks that run as jobs of a Ray cluster, over the HTTP API of Ray Jobs.

The job's id is the name of the execution, so Ray refuses to create it twice. A job does not belong to its submitter:
any worker that knows its name finds it. The function's result is the last line of the job's log.
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
from orchestrator.workers.executors.protocol import Gone, Poller, Setup, Unequipped, Watcher, function_outcome
from orchestrator.workers.executors.rest import Api, refusal

MAX_INPUT = 100_000
"""Bytes of input in a variable, at most. Linux allows 128 KiB, and Ray nests this variable in another."""
_END = "orchestrator-end"
"""The prefix of the line in a job's log that has the function's result."""
_START = f'import os; exec(os.environ["{PROGRAM}"])'
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_POLL_INTERVAL = 1.0
"""Seconds between two polls."""
_MAX_SINGLE_POLLS = 8
"""Jobs that are polled one by one, at most. More jobs are polled by listing all jobs of the cluster."""
_SETTLED = 2.0
"""Seconds after its end in which Ray may write a job's final state once more, even for a deleted job."""
_LOG_TRIES = 5
_LOG_PAUSE = 2.0
_LOG_LINES = 1_000
"""The last lines of a job's output that are logged, at most."""
_TOKEN = "RAY_AUTH_TOKEN"
_TEMPORARY = (401, 403, 404, 408, 429)
_EXISTS = b"already exists"
_UNKNOWN = b"does not exist"

JobState = Mapping[str, Any]


class RayExecutor:
    """Submits jobs to Ray clusters, and watches them."""

    options: ClassVar[type[Ray]] = Ray

    def __init__(self, setup: Setup) -> None:
        self._timeout = setup.settings.executor_timeout
        self._clusters: dict[str, _Cluster] = {}

    async def submit(self, execution: Execution) -> str:
        """Submit a job under the execution's name, unless that was done before."""
        cluster, options = self._cluster(execution), cast(Ray, execution.options)
        if (size := _input_size(execution)) > MAX_INPUT:
            raise GiveUp(
                f"The input of {execution.task} has {size:,} bytes, and a job of Ray takes {MAX_INPUT:,}: pass a "
                f"reference to the data instead."
            )
        answer = await cluster.api.ask("POST", "/api/jobs/", body=_submission(execution, options, _program()))
        if answer.status != 200 and _EXISTS not in answer.body:
            raise _refusal(answer, f"run {options.function}")
        return execution.name

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait until the job has ended. Log its output, and return its outcome."""
        cluster = self._cluster(execution)
        while (found := await cluster.poll.next(external_id)) is not None and not _has_ended(found):
            pass
        if found is None:
            raise Gone(f"Ray does not know the job {external_id} any more: the cluster's head was restarted.")
        if found.get("status") == "STOPPED":
            raise Gone(f"The job {external_id} was stopped at Ray.")
        text = await cluster.log(external_id)
        if isinstance(text, Broken):
            return text if found.get("status") == "SUCCEEDED" else _failure(found)
        lines, end = split_log(text, external_id)
        if lines:
            watcher.log("\n".join(lines[-_LOG_LINES:]))
        return _failure(found) if end is None else function_outcome(end, end.get("output"))

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Stop the job, wait for its end, and let the cluster forget it."""
        cluster, name, was_there = self._cluster(execution), execution.name, False
        while (found := await cluster.poll.next(name)) is not None and not _has_ended(found):
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
        """Stop watching. Jobs continue."""
        for cluster in self._clusters.values():
            await cluster.poll.close()
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
    """A cluster, and the periodic poll of its jobs."""

    def __init__(self, url: str, timeout: float) -> None:
        token = os.environ.get(_TOKEN, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.api = Api(url=url, headers=headers, timeout=timeout)
        self.poll: Poller[JobState] = Poller(self._poll, _POLL_INTERVAL)

    async def log(self, name: str) -> str | Broken:
        """Return the log of a job, or why it cannot be read."""
        for number in range(_LOG_TRIES):
            if number:
                await asyncio.sleep(_LOG_PAUSE)
            try:
                answer = await self.api.ask("GET", f"/api/jobs/{name}/logs")
            except TooLarge as error:
                return Broken("LogTooLarge", f"Its result is at the end of its log, which is too long: {error}.", False)
            if answer.status == 200 and isinstance(answer.data, dict):
                return str(answer.data.get("logs", ""))
        status = f"status {answer.status}"
        return Broken(
            "ResultLost", f"Its result is in its log, which Ray cannot read because the node is gone: {status}."
        )

    async def _poll(self, names: Collection[str]) -> Mapping[str, JobState]:
        if len(names) <= _MAX_SINGLE_POLLS:
            answers = await asyncio.gather(*(self.api.ask("GET", f"/api/jobs/{name}") for name in names))
            answers_by_name = zip(names, answers, strict=True)
            return {name: _read(answer) for name, answer in answers_by_name if not _is_unknown(answer)}
        jobs = _read(await self.api.ask("GET", "/api/jobs/"))
        return {str(job["submission_id"]): job for job in jobs if job.get("submission_id") in names}


def _is_unknown(answer: Answer) -> bool:
    """Return whether the job does not exist. A 404 without that message comes from a starting cluster head."""
    return answer.status == 404 and _UNKNOWN in answer.body


def _read(answer: Answer) -> Any:
    if answer.status != 200 or answer.data is None:
        raise _refusal(answer, "say what becomes of its jobs")
    return answer.data


def _refusal(answer: Answer, what: str) -> Exception:
    lines = answer.body.decode(errors="replace").strip().splitlines()
    return refusal(answer, f"Ray does not {what}", lines[-1][:500] if lines else "", _TEMPORARY)


@cache
def _program() -> str:
    return Path(__file__).with_name("on_cluster.py").read_text(encoding="utf-8")


def _submission(execution: Execution, options: Ray, program: str) -> dict[str, Any]:
    """Return the request body for a job. The job runs our program, which calls the function."""
    own = {SPECIFICATION: execution.specification.decode(), EXECUTION: execution.name, PROGRAM: program}
    body: dict[str, Any] = {
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
    return body | {name: amount for name, amount in reserved.items() if amount}


def _input_size(execution: Execution) -> int:
    """Return the size of the input inside a variable, as Ray encodes it."""
    return len(json.dumps(execution.specification.decode()))


def _has_ended(found: Mapping[str, Any]) -> bool:
    return found.get("status") in _ENDED


def split_log(text: str, name: str) -> tuple[list[str], dict[str, Any] | None]:
    """Return the lines of a job's log, and the result line's data, if there is one."""
    lines = text.splitlines()
    prefix = f"{_END} {name} "
    last = next((index for index in reversed(range(len(lines))) if lines[index].startswith(prefix)), None)
    if last is None:
        return lines, None
    try:
        end = msgspec.json.decode(lines[last][len(prefix) :], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return lines, None
    return lines[:last], end


def _failure(found: Mapping[str, Any]) -> Outcome:
    """Return the failure of a job whose function left no result."""
    message = str(found.get("message") or "and Ray gives no reason")
    first, _, rest = message.partition("\n")
    kind = "".join(word.capitalize() for word in str(found.get("error_type") or "job_failed").split("_"))
    return Broken(kind, f"The job failed at Ray: {first}", detail=rest)
