"""The executor `kubernetes`: options of a task that runs as a Job, and whether a worker can reach a cluster.

Every worker checks that at its start, and most have neither an account nor a kubeconfig, so `yaml` is loaded on use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from orchestrator.domain.executors.options import OUTPUT_VARIABLE, ExecutorOptions, ExecutorPlugin, Problems

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
OWN_LABEL = "orchestrator.dev/execution"
"""The label that selects all executions in a watch."""


class Kubernetes(ExecutorOptions, frozen=True, kw_only=True):
    """A Job with one Pod for each attempt, named like the execution. The exit code decides about success."""

    executor: ClassVar[str] = "kubernetes"

    image: str
    """The container image."""
    command: list[str] = []
    """The entry point, instead of the image's own."""
    args: list[str] = []
    """The arguments of the entry point, instead of the image's own."""
    namespace: str = ""
    """The namespace of the Job; by default that of the worker's account."""
    context: str = ""
    """A context of the worker's kubeconfig, for a worker that knows several clusters."""
    env: dict[str, str] = {}
    """Environment variables. Nothing secret: options are stored, and shown to people."""
    env_from_secrets: list[str] = []
    """Secrets of the namespace, all of whose keys become environment variables."""
    env_from_config_maps: list[str] = []
    """ConfigMaps of the namespace, all of whose keys become environment variables."""
    input: Literal["env", "config_map", "secret"] = "env"
    """Where the container finds its input: in the variable TASK_SPEC, or in the file named by TASK_SPEC_PATH."""
    output: Literal["log", "message", "store", "none"] = "log"
    """The source of the result: the last line of the log, the text in /dev/termination-log (4 kB at most), or the
    output that `orchestrator run-task` leaves in the payload store."""
    requests: dict[str, str] = {}
    """Resource requests, e.g. cpu: 500m, memory: 1Gi."""
    limits: dict[str, str] = {}
    """Resource limits."""
    service_account: str = ""
    """The service account of the Pod."""
    image_pull_secrets: list[str] = []
    node_selector: dict[str, str] = {}
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deadline: int | None = None
    """Seconds after which Kubernetes ends the Job; by default a little more than the task's timeout."""
    ttl: int = 86_400
    """Seconds for which Kubernetes keeps an ended Job. A worker must collect its result within that time."""
    image_patience: float = 300.0
    """Seconds for which pulling the image may fail."""
    grace: int = 30
    """Seconds between SIGTERM and SIGKILL when the Job is cancelled."""

    @property
    def wants(self) -> str:
        """The context, if one is set: workers announce which contexts they know."""
        return f"{self.executor} {self.context}" if self.context else self.executor

    def problems(self) -> Problems:
        problems = []
        if not self.image or self.image != self.image.strip():
            problems.append(("image", f"expected the name of an image, found {self.image!r}."))
        for option, name in (("namespace", self.namespace), ("service_account", self.service_account)):
            if name and not _LABEL.fullmatch(name):
                problems.append((option, f"expected lowercase letters, digits and -, at most 63, found {name!r}."))
        for name in self.env:
            is_ours = name in ("TASK_SPEC", "TASK_SPEC_PATH") or (name == OUTPUT_VARIABLE and self.output == "store")
            if not _VARIABLE.fullmatch(name) or is_ours:
                problems.append(("env", f"{name!r} cannot be set as a variable here."))
        for option, quantities in (("requests", self.requests), ("limits", self.limits)):
            for name, quantity in quantities.items():
                if not _QUANTITY.fullmatch(quantity):
                    problems.append((option, f"{name}: expected a quantity such as 500m or 1Gi, found {quantity!r}."))
        for name, value in self.labels.items():
            if not _LABEL_KEY.fullmatch(name) or not _LABEL_VALUE.fullmatch(value) or name == OWN_LABEL:
                problems.append(("labels", f"{name}: {value} cannot be a label here."))
        for option, number, least in (("ttl", self.ttl, 60), ("grace", self.grace, 0), ("deadline", self.deadline, 1)):
            if number is not None and number < least:
                problems.append((option, f"expected {least} seconds or more, found {number}."))
        if not self.image_patience >= 0:
            problems.append(("image_patience", f"expected zero or more seconds, found {self.image_patience:g}."))
        return problems


def has_account(environ: Mapping[str, str], account: Path = ACCOUNT) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST")) and (account / "token").is_file()


def _contexts(environ: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Return whether the kubeconfig has a current context, and the names of its contexts; none if it is unreadable."""
    try:
        text = kubeconfig(environ).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError):  # also without a home directory
        return False, []
    import yaml

    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return False, []
    if not isinstance(document, dict) or not isinstance(entries := document.get("contexts"), list):
        return False, []
    named = sorted({str(entry["name"]) for entry in entries if isinstance(entry, dict) and entry.get("name")})
    return document.get("current-context") in named, named


def kubeconfig(environ: Mapping[str, str]) -> Path:
    """Return the path of the kubeconfig, which need not exist."""
    configured = environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    return Path(configured) if configured else Path.home() / ".kube" / "config"


def _equipment(environ: Mapping[str, str], account: Path = ACCOUNT) -> list[str]:
    current, named = _contexts(environ)
    can = current or has_account(environ, account)
    return [*(["kubernetes"] if can else []), *(f"kubernetes {context}" for context in named)]


PLUGIN = ExecutorPlugin(
    options=Kubernetes,
    driver="orchestrator.plugins.executors.kubernetes.driver:KubernetesExecutor",
    equipment=_equipment,
)
