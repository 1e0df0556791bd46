"""Tasks that run as Jobs of Kubernetes, over its HTTP API.

The Job has the name of the execution, so Kubernetes itself refuses to create it twice. The output of the container is
its log; the last line, or the termination message, is the result.

Kubernetes' Python client is not used: it blocks, so each watch would need a thread; it takes a second to load, twenty
times as long as h11; and most of this folder, which interprets states, would still be needed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.errors import GiveUp
from orchestrator.plugins.executors.kubernetes import OWN_LABEL, Kubernetes
from orchestrator.plugins.executors.kubernetes.access import (
    Cluster,
    Followed,
    NamespaceWatch,
    find_cluster,
    path_of,
    refusal_text,
)
from orchestrator.plugins.executors.kubernetes.job import (
    CONTAINER,
    MAX_FILE,
    MAX_VARIABLE,
    ended_for,
    failure,
    file_of,
    job_of,
    output_of,
    start_trouble,
    terminated,
    verdict,
)
from orchestrator.workers.executors.asking import Answer, TooLarge
from orchestrator.workers.executors.left_outputs import ExecutionFolders
from orchestrator.workers.executors.protocol import Gone, Setup, Unreachable, Watcher, finished
from orchestrator.workers.executors.rest import Api

_CREATED = (200, 201, 202)
_TEMPORARY = (401, 403, 408, 429)
"""Refusals that may be temporary: an account being set up, an exhausted quota, too many requests."""
_DELETION_CHECK = 5.0
"""Seconds after which a deletion is checked, if no event arrives."""
_EXPIRY = 60
"""Seconds after which Kubernetes deletes a Job whose result is in Postgres."""
_MERGE = "application/merge-patch+json"
_MAX_LINES = 1_000
_MAX_DETAIL = 4_000
_FILES = {"secret": "secrets", "config_map": "configmaps"}


class _Space(NamedTuple):
    """A namespace of a cluster, and its watch."""

    api: Api
    namespace: str
    watch: NamespaceWatch

    def path(self, kind: str, name: str = "") -> str:
        return path_of(kind, self.namespace, name)


class KubernetesExecutor:
    """Creates Jobs, and watches them."""

    options: ClassVar[type[Kubernetes]] = Kubernetes

    def __init__(self, setup: Setup) -> None:
        self._settings = setup.settings
        self._stored_outputs = ExecutionFolders(self._settings)
        self._clusters: dict[str, Cluster] = {}
        self._spaces: dict[tuple[str, str], _Space] = {}

    async def submit(self, execution: Execution) -> str:
        """Create the input of the Job, and the Job under the execution's name, unless they exist."""
        space, options = self._space(execution)
        size, limit = len(execution.specification), MAX_VARIABLE if options.input == "env" else MAX_FILE
        if size > limit:
            advice = "set the option input to secret or config_map" if options.input == "env" else "pass less"
            raise GiveUp(f"The input of {execution.task} has {size:,} bytes, and {limit:,} fit there: {advice}.")
        if options.input != "env":
            file = await space.api.ask("POST", space.path(_FILES[options.input]), body=file_of(execution, options))
            _check(file, "its input")
        output = self._stored_outputs.address(execution) if options.output == "store" else ""
        created = await space.api.ask("POST", space.path("jobs"), body=job_of(execution, options, output))
        _check(created, "the Job")
        if options.input != "env" and created.status != 409:
            await self._set_owner(space, options, execution.name, created.data)
        return f"{space.namespace}/{execution.name}"

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait until the Job has ended. Log its output, and return its outcome."""
        space, options = self._space(execution)
        with space.watch.following(execution.name) as followed:
            found = await space.api.ask("GET", space.path("jobs", execution.name))
            if found.status == 404:
                raise _gone(external_id)
            if found.status != 200:
                raise Unreachable(refusal_text(found))
            if followed.job is None and not followed.is_gone:
                followed.update("jobs", found.data)
            patience = _ImageWait(options.image_patience, watcher)
            while True:
                if followed.is_gone or followed.job is None:
                    raise _gone(external_id)
                result = verdict(followed.job)
                if result is not None:
                    return await self._collect(space, execution, followed.job, result == "complete", watcher)
                broken = patience.judge(followed)
                if broken is not None:
                    return broken
                await followed.change(patience.remaining)

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the Job with its Pod. Return when both are gone."""
        space, _ = self._space(execution)
        with space.watch.following(execution.name) as followed:
            while not await self._delete(space, execution.name, "Foreground"):
                await followed.change(_DELETION_CHECK)
        await self._forget(space, execution)

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the Job. Its Pod follows."""
        space, _ = self._space(execution)
        await self._delete(space, execution.name, "Background")
        await self._forget(space, execution)

    async def expire(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Let Kubernetes delete the Job with its input in a minute, or after `ttl` if that is not allowed."""
        space, _ = self._space(execution)
        found = await space.api.ask("GET", space.path("jobs", execution.name))
        if found.status == 200:
            change = {"spec": {"ttlSecondsAfterFinished": math.ceil(ended_for(found.data, time.time()) + _EXPIRY)}}
            await space.api.ask("PATCH", space.path("jobs", execution.name), body=change, content_type=_MERGE)

    async def close(self) -> None:
        """Stop watching. Jobs continue."""
        for space in self._spaces.values():
            await space.watch.close()
        self._spaces.clear()

    async def _set_owner(self, space: _Space, options: Kubernetes, name: str, job: Any) -> None:
        """Make the Job the owner of its input, so that both are deleted together. A failure does no harm."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        change = {"metadata": {"ownerReferences": [owner]}}
        path = space.path(_FILES[options.input], name)
        await space.api.ask("PATCH", path, body=change, content_type=_MERGE)

    async def _delete(self, space: _Space, name: str, policy: str) -> bool:
        """Delete the Job. Return whether it is already gone."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy}
        answer = await space.api.ask("DELETE", space.path("jobs", name), body=body)
        if answer.status not in (*_CREATED, 404, 409):
            raise Unreachable(refusal_text(answer))
        return answer.status == 404

    async def _forget(self, space: _Space, execution: Execution) -> None:
        """Delete the input in a ConfigMap or Secret, and the output in the payload store."""
        options = cast(Kubernetes, execution.options)
        if options.output == "store":
            await self._stored_outputs.delete(execution)
        if options.input != "env":
            answer = await space.api.ask("DELETE", space.path(_FILES[options.input], execution.name))
            if answer.status not in (*_CREATED, 404):
                raise Unreachable(refusal_text(answer))

    async def _collect(
        self, space: _Space, execution: Execution, job: Any, is_complete: bool, watcher: Watcher
    ) -> Outcome:
        """Read the log of an ended Job, and return its outcome."""
        options = cast(Kubernetes, execution.options)
        pods = await space.api.ask("GET", space.path("pods"), {"labelSelector": f"{OWN_LABEL}={execution.name}"})
        if pods.status != 200:
            raise Unreachable(refusal_text(pods))
        found = sorted(pods.data["items"], key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        pod = found[-1] if found else None
        try:
            lines = await self._log(space, pod["metadata"]["name"]) if pod is not None else []
        except TooLarge as error:
            return Broken("OutputTooLarge", f"The log cannot be read: {error}.", False)
        last = lines.pop() if is_complete and options.output == "log" and lines else ""
        if lines:
            watcher.log("\n".join(lines[-_MAX_LINES:]))
        if options.output == "store":
            seen = Finished() if is_complete else failure(job, pod, "\n".join(lines)[-_MAX_DETAIL:])
            return await self._stored_outputs.outcome(execution, seen)
        if not is_complete:
            return failure(job, pod, "\n".join(lines)[-_MAX_DETAIL:])
        if options.output == "log" and pod is None:
            return Broken("OutputLost", "The work is done, but its Pod, which had the result in its log, is gone.")
        if options.output == "message":
            last = str((terminated(pod) or {}).get("message") or "")
        return finished(output_of(last)) if last else Finished()

    async def _log(self, space: _Space, pod: str) -> list[str]:
        """Return the last lines of a Pod's log. Each may be large."""
        query = {"container": CONTAINER, "tailLines": str(_MAX_LINES + 1)}
        last_lines: deque[bytes] = deque(maxlen=_MAX_LINES + 1)
        async with space.api.lines(space.path("pods", pod) + "/log", query, silence=space.api.timeout) as (head, lines):
            if head.status == 404 or (head.status == 400 and b"waiting to start" in head.body):
                return []
            if head.status != 200:
                raise Unreachable(refusal_text(head))
            async for line in lines:
                last_lines.append(line)
        return [line.decode(errors="replace") for line in last_lines if line.strip()]

    def _space(self, execution: Execution) -> tuple[_Space, Kubernetes]:
        options = cast(Kubernetes, execution.options)
        if options.context not in self._clusters:
            found = find_cluster(options.context)
            api = replace(found.api, timeout=self._settings.executor_timeout)
            self._clusters[options.context] = Cluster(api, found.namespace)
        cluster = self._clusters[options.context]
        namespace = options.namespace or cluster.namespace
        key = (options.context, namespace)
        if key not in self._spaces:
            self._spaces[key] = _Space(cluster.api, namespace, NamespaceWatch(cluster.api, namespace))
        return self._spaces[key], options


class _ImageWait:
    """Limits how long a Pod may fail to start."""

    def __init__(self, limit: float, watcher: Watcher) -> None:
        self._limit = limit
        self._watcher = watcher
        self._since: float | None = None
        self._logged_text = ""

    @property
    def remaining(self) -> float | None:
        """Seconds left to wait; None while nothing is wrong."""
        return None if self._since is None else max(0.0, self._limit - (time.monotonic() - self._since))

    def judge(self, followed: Followed) -> Broken | None:
        """Return a failure if the Pod will not start, or has taken too long. Log each reason once."""
        found = None if followed.pod is None else start_trouble(followed.pod)
        if found is None:
            self._since = None
            return None
        if self._since is None:
            self._since = time.monotonic()
        if found.text != self._logged_text:
            self._logged_text = found.text
            self._watcher.log(f"The Pod does not start: {found.text}", level="warning")
        if found.is_hopeless or self.remaining == 0:
            kind = "ImagePullFailed" if found.is_image else "PodNotStarted"
            return Broken(kind, f"The Pod does not start: {found.text}", not found.is_hopeless)
        return None


def _check(answer: Answer, object_name: str) -> None:
    """Accept a created or existing object. Raise an error otherwise, by whether the refusal may be temporary."""
    if answer.status in (*_CREATED, 409):
        return
    if answer.status in _TEMPORARY or answer.status >= 500:
        raise Unreachable(refusal_text(answer))
    raise GiveUp(f"Kubernetes does not create {object_name}: {refusal_text(answer)}")


def _gone(external_id: str) -> Gone:
    return Gone(f"Kubernetes has no Job {external_id} any longer: it was deleted, or its ttl has passed.")
