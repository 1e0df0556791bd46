"""A Kubernetes Job as data: the Job created for an execution, and the meaning of its state and that of its Pod."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from orchestrator.domain.executors.options import OUTPUT_VARIABLE, Broken, Execution
from orchestrator.plugins.executors.kubernetes import OWN_LABEL, Kubernetes

CONTAINER = "task"
MAX_VARIABLE = 100_000
"""Bytes of input in an environment variable, at most. Linux allows 128 kB."""
MAX_FILE = 1_000_000
"""Bytes of input in a ConfigMap or Secret, at most. Kubernetes allows 1 MiB."""
_MOUNTED = "/orchestrator"
_FILE = "task.json"
_HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_PULLING = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"})
_STUCK = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


class Trouble(NamedTuple):
    """Why a Pod does not start."""

    text: str
    is_hopeless: bool
    """Waiting does not help."""
    is_image: bool = True


def job_of(execution: Execution, options: Kubernetes, output: str = "") -> dict[str, Any]:
    """Return the Job for an execution. With `output`, the Job leaves its output at that address."""
    variables = {**options.env, "TASK_ID": execution.task_id, "TASK_ATTEMPT": str(execution.attempt)}
    _add(variables, **{OUTPUT_VARIABLE: output})
    container: dict[str, Any] = {"name": CONTAINER, "image": options.image}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "containers": [container],
    }
    if options.input == "env":
        variables["TASK_SPEC"] = execution.specification.decode()
    else:
        variables["TASK_SPEC_PATH"] = f"{_MOUNTED}/{_FILE}"
        container["volumeMounts"] = [{"name": "task", "mountPath": _MOUNTED, "readOnly": True}]
        mounted = {"secret": {"secretName": execution.name}}
        if options.input == "config_map":
            mounted = {"configMap": {"name": execution.name}}
        pod["volumes"] = [{"name": "task", **mounted}]
    container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    secrets = [{"secretRef": {"name": name}} for name in options.env_from_secrets]
    maps = [{"configMapRef": {"name": name}} for name in options.env_from_config_maps]
    _add(container, command=options.command, args=options.args, envFrom=secrets + maps)
    resources = {"requests": options.requests, "limits": options.limits}
    _add(container, resources={name: dict(value) for name, value in resources.items() if value})
    pull = [{"name": name} for name in options.image_pull_secrets]
    _add(pod, serviceAccountName=options.service_account, nodeSelector=options.node_selector, imagePullSecrets=pull)
    limit = options.deadline if options.deadline is not None else options.backstop(execution.timeout)
    spec: dict[str, Any] = {
        "backoffLimit": 0,  # attempts are counted by the task's retry policy
        "ttlSecondsAfterFinished": options.ttl,
        "template": {"metadata": _labelled({}, execution, options), "spec": pod},
    }
    _add(spec, activeDeadlineSeconds=None if limit is None else math.ceil(limit))
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _labelled({"name": execution.name}, execution, options),
        "spec": spec,
    }


def file_of(execution: Execution, options: Kubernetes) -> dict[str, Any]:
    """Return the ConfigMap or Secret with the input of an execution."""
    text = {_FILE: execution.specification.decode()}
    metadata = _labelled({"name": execution.name}, execution, options)
    if options.input == "secret":
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": text}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": text}


def ended_for(job: Mapping[str, Any], now: float) -> float:
    """Return the seconds since the end of a Job, from its own timestamps and our clock; 0 if it has none."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            since = str(condition.get("lastTransitionTime") or "")
            return max(0.0, now - datetime.fromisoformat(since).timestamp()) if since else 0.0
    return 0.0


def verdict(job: Mapping[str, Any]) -> Literal["complete", "failed"] | None:
    """Return how a Job has ended, or None. A Job that fails during its deletion is soon gone."""
    is_deleted = bool(job.get("metadata", {}).get("deletionTimestamp"))
    for condition in job.get("status", {}).get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            if condition["type"] == "Complete":
                return "complete"
            return None if is_deleted else "failed"
    return None


def failure(job: Mapping[str, Any], pod: Mapping[str, Any] | None, log: str) -> Broken:
    conditions = job.get("status", {}).get("conditions") or ()
    condition: Mapping[str, Any] = next((item for item in conditions if item.get("type") == "Failed"), {})
    ended = terminated(pod)
    if condition.get("reason") == "DeadlineExceeded":
        return Broken("DeadlineExceeded", "Kubernetes has ended the Job: its deadline has passed.", detail=log)
    if ended is not None and ended.get("reason") == "OOMKilled":
        return Broken("OutOfMemory", "The container was killed: it used more memory than its limit.", detail=log)
    if ended is not None and ended.get("exitCode"):
        return Broken("ExitCode", f"The container ended with exit code {ended['exitCode']}.", detail=log)
    if pod is not None and pod.get("status", {}).get("reason"):
        status = pod["status"]
        return Broken(str(status["reason"]), str(status.get("message") or f"The Pod: {status['reason']}."), detail=log)
    reason = condition.get("message") or condition.get("reason") or "and gives no reason"
    return Broken("JobFailed", f"Kubernetes says that the Job failed: {reason}.", detail=log)


def terminated(pod: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return how the container of a Pod ended; None if it has not, or if unknown."""
    for status in ((pod or {}).get("status", {}).get("containerStatuses")) or ():
        if status.get("name") == CONTAINER:
            found: Mapping[str, Any] | None = status.get("state", {}).get("terminated")
            return found
    return None


def start_trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """Return why the container of a Pod does not start, or None."""
    for status in pod.get("status", {}).get("containerStatuses") or ():
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in _HOPELESS | _PULLING | _STUCK:
            text = f"{reason}: {waiting['message']}" if waiting.get("message") else str(reason)
            return Trouble(text, reason in _HOPELESS, reason not in _STUCK)
    return None


def output_of(text: str) -> Any:
    """Parse the output of a program: JSON if possible, otherwise text."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError):
        return text


def _labelled(metadata: dict[str, Any], execution: Execution, options: Kubernetes) -> dict[str, Any]:
    labels = {**options.labels, "app.kubernetes.io/managed-by": "orchestrator", OWN_LABEL: execution.name}
    details = {"task": execution.task, "task-id": execution.task_id, "run-id": execution.run_id, "step": execution.step}
    annotations = {
        **options.annotations,
        **{f"orchestrator.dev/{name}": value for name, value in details.items() if value},
    }
    return {**metadata, "labels": labels, "annotations": annotations}


def _add(target: dict[str, Any], **values: Any) -> None:
    target.update({name: value for name, value in values.items() if value})
