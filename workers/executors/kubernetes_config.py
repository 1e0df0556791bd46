"""Whether a worker can get into a cluster, without getting in: its Pod's account, and the contexts of its kubeconfig.

Every worker looks at its start, and most have neither: nothing is imported here that only those need which have one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def has_account(environ: Mapping[str, str], account: Path = ACCOUNT) -> bool:
    """Say whether this runs in a Pod that has an account."""
    return bool(environ.get("KUBERNETES_SERVICE_HOST")) and (account / "token").is_file()


def contexts(environ: Mapping[str, str]) -> tuple[bool, list[str]]:
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
