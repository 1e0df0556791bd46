"""What a worker was given for its executors: what it lacks it does not announce, and tasks wait for one that has it.

Which variable holds an address, a task may say. So a worker announces each of its variables whose value is an address
of the kind that an executor needs, by name: `rq RQ_REDIS_URL`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.workers.executors.kubernetes_config import ACCOUNT, contexts, has_account
from orchestrator.workers.executors.protocol import Setup

_LONGEST = 200
_MODEL = Path("/sys/class/dmi/id/product_name")
_OF_GOOGLE = ("GCE_METADATA_HOST", "K_SERVICE", "CLOUD_RUN_JOB", "KUBERNETES_SERVICE_HOST")
"""Variables that say that a metadata server may be there."""


def equipment(name: str, setup: Setup, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what a worker announces of an executor that it has the packages for."""
    if name == "process":
        return [f"process {command}" for command in setup.commands if _may_be_there(command, environ)]
    return _FOUND[name](environ) if name in _FOUND else [name]


def _may_be_there(command: str, environ: Mapping[str, str]) -> bool:
    """Say whether a program is on this machine; of a pattern, only trying tells."""
    return any(sign in command for sign in "*?[") or shutil.which(command, path=environ.get("PATH")) is not None


def _addresses(name: str, *schemes: str) -> Callable[[Mapping[str, str]], list[str]]:
    def found(environ: Mapping[str, str]) -> list[str]:
        given = (one for one, value in environ.items() if value.startswith(schemes) and len(one) <= _LONGEST)
        return [f"{name} {variable}" for variable in sorted(given)]

    return found


def _or_told(name: str, *schemes: str) -> Callable[[Mapping[str, str]], list[str]]:
    """Where a task may say the address itself, a worker needs none."""
    variables = _addresses(name, *schemes)
    return lambda environ: [name, *variables(environ)]


def _kubernetes(environ: Mapping[str, str], account: Path = ACCOUNT) -> list[str]:
    current, named = contexts(environ)
    can = current or has_account(environ, account)
    return [*(["kubernetes"] if can else []), *(f"kubernetes {context}" for context in named)]


def _cloud_run(environ: Mapping[str, str], model: Path = _MODEL) -> list[str]:
    if key := environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return ["cloud_run"] if os.access(key, os.R_OK) else []
    try:
        is_theirs = "Google" in model.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        is_theirs = False
    return ["cloud_run"] if is_theirs or any(environ.get(variable) for variable in _OF_GOOGLE) else []


_FOUND: dict[str, Callable[[Mapping[str, str]], list[str]]] = {
    "cloud_run": _cloud_run,
    "dask": _or_told("dask", "tcp://", "tls://", "ucx://", "ws://", "wss://"),
    "kubernetes": _kubernetes,
    "ray": _addresses("ray", "http://", "https://"),
    "rq": _or_told("rq", "redis://", "rediss://", "unix://"),
}
