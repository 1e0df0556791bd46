"""Tasks that run as Jobs of Kubernetes, over its own HTTP API.

The name of the Job is that of the execution, so Kubernetes itself refuses to create a second one. What the container
writes is its log; its last line, or the termination message, is the result.

Kubernetes' own client for Python was weighed. It blocks, so that each watch would need a thread; loading it takes a
second, twenty times as long as h11; and most of this folder, which decides what a state means, would stay.
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
    told,
)
from orchestrator.plugins.executors.kubernetes.job import (
    CONTAINER,
    LARGEST_FILE,
    LARGEST_VARIABLE,
    ended_for,
    failure,
    file_of,
    job_of,
    output_of,
    terminated,
    trouble,
    verdict,
)
from orchestrator.workers.executors.asking import Answer, TooLarge
from orchestrator.workers.executors.left_outputs import LeftOutputs
from orchestrator.workers.executors.protocol import Gone, Setup, Unreachable, Watcher, finished
from orchestrator.workers.executors.rest import Api

_CREATED = (200, 201, 202)
_WAIT = (401, 403, 408, 429)
"""Refusals that may pass: an account that is being set up, a quota that is used up, too many requests."""
_LOOK_AGAIN = 5.0
"""Seconds after which a deletion is checked, if no event came."""
_EXPIRES = 60
"""Seconds after which Kubernetes deletes a Job by itself whose end is in Postgres."""
_MERGE = "application/merge-patch+json"
_LINES_SHOWN = 1_000
_DETAIL = 4_000
_FILES = {"secret": "secrets", "config_map": "configmaps"}


class _Space(NamedTuple):
    """A namespace of a cluster."""

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
        self._left = LeftOutputs(self._settings)
        self._clusters: dict[str, Cluster] = {}
        self._spaces: dict[tuple[str, str], _Space] = {}

    async def submit(self, execution: Execution) -> str:
        """Create a Job under the execution's name, unless there is one, and what it reads before it."""
        space, options = self._space(execution)
        size, largest = len(execution.specification), LARGEST_VARIABLE if options.input == "env" else LARGEST_FILE
        if size > largest:
            advice = "set the option input to secret or config_map" if options.input == "env" else "pass less"
            raise GiveUp(f"The input of {execution.task} has {size:,} bytes, and {largest:,} fit there: {advice}.")
        if options.input != "env":
            file = await space.api.ask("POST", space.path(_FILES[options.input]), body=file_of(execution, options))
            _check(file, "its input")
        output = self._left.address(execution) if options.output == "store" else ""
        created = await space.api.ask("POST", space.path("jobs"), body=job_of(execution, options, output))
        _check(created, "the Job")
        if options.input != "env" and created.status != 409:
            await self._own(space, options, execution.name, created.data)
        return f"{space.namespace}/{execution.name}"

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Return how the Job ended; its log is shown when it has."""
        space, options = self._space(execution)
        with space.watch.following(execution.name) as seen:
            found = await space.api.ask("GET", space.path("jobs", execution.name))
            if found.status == 404:
                raise _gone(external_id)
            if found.status != 200:
                raise Unreachable(told(found))
            if seen.job is None and not seen.is_gone:
                seen.show("jobs", found.data)
            patience = _ImageWait(options.image_patience, watcher)
            while True:
                if seen.is_gone or seen.job is None:
                    raise _gone(external_id)
                how = verdict(seen.job)
                if how is not None:
                    return await self._collect(space, execution, seen.job, how == "complete", watcher)
                hopeless = patience.judge(seen)
                if hopeless is not None:
                    return hopeless
                await seen.change(patience.left)

    async def cancel(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the Job with its Pod, and return when both are gone."""
        space, _ = self._space(execution)
        with space.watch.following(execution.name) as seen:
            while not await self._delete(space, execution.name, "Foreground"):
                await seen.change(_LOOK_AGAIN)
        await self._forget(space, execution)

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the Job; its Pod follows."""
        space, _ = self._space(execution)
        await self._delete(space, execution.name, "Background")
        await self._forget(space, execution)

    async def expire(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Have Kubernetes delete the Job in a minute, with what it reads; where that is not allowed, after `ttl`."""
        space, _ = self._space(execution)
        found = await space.api.ask("GET", space.path("jobs", execution.name))
        if found.status == 200:
            change = {"spec": {"ttlSecondsAfterFinished": math.ceil(ended_for(found.data, time.time()) + _EXPIRES)}}
            await space.api.ask("PATCH", space.path("jobs", execution.name), body=change, content_type=_MERGE)

    async def close(self) -> None:
        """Watch no more; Jobs go on."""
        for space in self._spaces.values():
            await space.watch.close()
        self._spaces.clear()

    async def _own(self, space: _Space, options: Kubernetes, name: str, job: Any) -> None:
        """Let the input be deleted with its Job; if that fails, nothing is lost."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        change = {"metadata": {"ownerReferences": [owner]}}
        path = space.path(_FILES[options.input], name)
        await space.api.ask("PATCH", path, body=change, content_type=_MERGE)

    async def _delete(self, space: _Space, name: str, policy: str) -> bool:
        """Ask for a deletion, and say whether there is nothing any more."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy}
        answer = await space.api.ask("DELETE", space.path("jobs", name), body=body)
        if answer.status not in (*_CREATED, 404, 409):
            raise Unreachable(told(answer))
        return answer.status == 404

    async def _forget(self, space: _Space, execution: Execution) -> None:
        """Delete the input that stands in a file, and the output that stands in the payload store."""
        options = cast(Kubernetes, execution.options)
        if options.output == "store":
            await self._left.delete(execution)
        if options.input != "env":
            answer = await space.api.ask("DELETE", space.path(_FILES[options.input], execution.name))
            if answer.status not in (*_CREATED, 404):
                raise Unreachable(told(answer))

    async def _collect(
        self, space: _Space, execution: Execution, job: Any, is_complete: bool, watcher: Watcher
    ) -> Outcome:
        """Read the log of a Job that has ended, and return its outcome."""
        options = cast(Kubernetes, execution.options)
        pods = await space.api.ask("GET", space.path("pods"), {"labelSelector": f"{OWN_LABEL}={execution.name}"})
        if pods.status != 200:
            raise Unreachable(told(pods))
        found = sorted(pods.data["items"], key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        pod = found[-1] if found else None
        try:
            lines = await self._log(space, pod["metadata"]["name"]) if pod is not None else []
        except TooLarge as error:
            return Broken("OutputTooLarge", f"The log cannot be read: {error}.", False)
        last = lines.pop() if is_complete and options.output == "log" and lines else ""
        if lines:
            watcher.log("\n".join(lines[-_LINES_SHOWN:]))
        if options.output == "store":
            seen = Finished() if is_complete else failure(job, pod, "\n".join(lines)[-_DETAIL:])
            return await self._left.outcome(execution, seen)
        if not is_complete:
            return failure(job, pod, "\n".join(lines)[-_DETAIL:])
        if options.output == "log" and pod is None:
            return Broken("OutputLost", "The work is done, but its Pod, which had the result in its log, is gone.")
        if options.output == "message":
            last = str((terminated(pod) or {}).get("message") or "")
        return finished(output_of(last)) if last else Finished()

    async def _log(self, space: _Space, pod: str) -> list[str]:
        """Return the last lines of a Pod's log, of which each may be large."""
        query = {"container": CONTAINER, "tailLines": str(_LINES_SHOWN + 1)}
        kept: deque[bytes] = deque(maxlen=_LINES_SHOWN + 1)
        async with space.api.lines(space.path("pods", pod) + "/log", query, silence=space.api.timeout) as (head, lines):
            if head.status == 404 or (head.status == 400 and b"waiting to start" in head.body):
                return []
            if head.status != 200:
                raise Unreachable(told(head))
            async for line in lines:
                kept.append(line)
        return [line.decode(errors="replace") for line in kept if line.strip()]

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
    """Waits for a Pod that cannot start, for as long as that may heal."""

    def __init__(self, longest: float, watcher: Watcher) -> None:
        self._longest = longest
        self._watcher = watcher
        self._since: float | None = None
        self._told = ""

    @property
    def left(self) -> float | None:
        """Seconds until it is at its end; None while nothing is wrong."""
        return None if self._since is None else max(0.0, self._longest - (time.monotonic() - self._since))

    def judge(self, seen: Followed) -> Broken | None:
        """Return that it will never start, if so; the reason is logged once."""
        found = None if seen.pod is None else trouble(seen.pod)
        if found is None:
            self._since = None
            return None
        if self._since is None:
            self._since = time.monotonic()
        if found.text != self._told:
            self._told = found.text
            self._watcher.log(f"The Pod does not start: {found.text}", level="warning")
        if found.is_hopeless or self.left == 0:
            kind = "ImagePullFailed" if found.is_image else "PodNotStarted"
            return Broken(kind, f"The Pod does not start: {found.text}", not found.is_hopeless)
        return None


def _check(answer: Answer, what: str) -> None:
    """Let pass what was created, or is there; raise for the rest, by whether it may pass."""
    if answer.status in (*_CREATED, 409):
        return
    if answer.status in _WAIT or answer.status >= 500:
        raise Unreachable(told(answer))
    raise GiveUp(f"Kubernetes does not create {what}: {told(answer)}")


def _gone(external_id: str) -> Gone:
    return Gone(f"Kubernetes has no Job {external_id} any more: somebody has deleted it, or its ttl has passed.")
