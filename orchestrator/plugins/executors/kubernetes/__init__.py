"""The executor `kubernetes`: what a task says that runs as a Job, and whether a worker can get into a cluster.

Every worker looks at its start, and most have neither an account nor a kubeconfig: `yaml` is loaded for those that do.
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
"""The label by which workers watch all executions at once."""


class Kubernetes(ExecutorOptions, frozen=True, kw_only=True):
    """A Job for each try, with one Pod; its name is that of the execution. The exit code decides."""

    executor: ClassVar[str] = "kubernetes"

    image: str
    """What runs."""
    command: list[str] = []
    """The entry point, instead of the image's own."""
    args: list[str] = []
    """Its arguments, instead of the image's own."""
    namespace: str = ""
    """Where it runs; where nothing is said, where the worker's own account is."""
    context: str = ""
    """A context of the worker's kubeconfig, for a worker that has several clusters."""
    env: dict[str, str] = {}
    """Variables of its environment; nothing secret, because options are stored and shown to people."""
    env_from_secrets: list[str] = []
    """Secrets of the namespace, all of whose keys become variables."""
    env_from_config_maps: list[str] = []
    """ConfigMaps of the namespace, all of whose keys become variables."""
    input: Literal["env", "config_map", "secret"] = "env"
    """Where it finds its input: in the variable TASK_SPEC, or in the file that TASK_SPEC_PATH names."""
    output: Literal["log", "message", "store", "none"] = "log"
    """What it has done: the last line of its log, what it wrote to /dev/termination-log (4 kB at most), or what
    `orchestrator run-task` leaves in the payload store."""
    requests: dict[str, str] = {}
    """What it needs, e.g. cpu: 500m, memory: 1Gi."""
    limits: dict[str, str] = {}
    """What it may use."""
    service_account: str = ""
    """The account that it runs as."""
    image_pull_secrets: list[str] = []
    node_selector: dict[str, str] = {}
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deadline: int | None = None
    """Seconds after which Kubernetes ends it; a little more than the task's own timeout if not given."""
    ttl: int = 86_400
    """Seconds for which Kubernetes keeps it when it has ended, which is how long nobody of us need look."""
    image_patience: float = 300.0
    """Seconds for which an image may fail to be pulled."""
    grace: int = 30
    """Seconds between SIGTERM and SIGKILL when it is cancelled."""

    @property
    def wants(self) -> str:
        """The context, if there is one: workers say which of them they know."""
        return f"{self.executor} {self.context}" if self.context else self.executor

    def problems(self) -> Problems:
        found = []
        if not self.image or self.image != self.image.strip():
            found.append(("image", f"expected the name of an image, found {self.image!r}."))
        for option, name in (("namespace", self.namespace), ("service_account", self.service_account)):
            if name and not _LABEL.fullmatch(name):
                found.append((option, f"expected small letters, digits and -, at most 63, found {name!r}."))
        for name in self.env:
            is_ours = name in ("TASK_SPEC", "TASK_SPEC_PATH") or (name == OUTPUT_VARIABLE and self.output == "store")
            if not _VARIABLE.fullmatch(name) or is_ours:
                found.append(("env", f"{name!r} cannot be the name of a variable here."))
        for option, quantities in (("requests", self.requests), ("limits", self.limits)):
            for name, quantity in quantities.items():
                if not _QUANTITY.fullmatch(quantity):
                    found.append((option, f"{name}: expected a quantity such as 500m or 1Gi, found {quantity!r}."))
        for name, value in self.labels.items():
            if not _LABEL_KEY.fullmatch(name) or not _LABEL_VALUE.fullmatch(value) or name == OWN_LABEL:
                found.append(("labels", f"{name}: {value} cannot be a label here."))
        for option, number, least in (("ttl", self.ttl, 60), ("grace", self.grace, 0), ("deadline", self.deadline, 1)):
            if number is not None and number < least:
                found.append((option, f"expected {least} seconds or more, found {number}."))
        if not self.image_patience >= 0:
            found.append(("image_patience", f"expected zero or more seconds, found {self.image_patience:g}."))
        return found


def has_account(environ: Mapping[str, str], account: Path = ACCOUNT) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST")) and (account / "token").is_file()


def _contexts(environ: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Say whether the kubeconfig names a context of its own, and which it knows; none if it cannot be read."""
    try:
        text = kubeconfig(environ).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError):  # also where there is no home
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
    """Return where the kubeconfig is, or would be."""
    given = environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    return Path(given) if given else Path.home() / ".kube" / "config"


def _equipment(environ: Mapping[str, str], account: Path = ACCOUNT) -> list[str]:
    current, named = _contexts(environ)
    can = current or has_account(environ, account)
    return [*(["kubernetes"] if can else []), *(f"kubernetes {context}" for context in named)]


PLUGIN = ExecutorPlugin(
    options=Kubernetes,
    driver="orchestrator.plugins.executors.kubernetes.driver:KubernetesExecutor",
    equipment=_equipment,
)
