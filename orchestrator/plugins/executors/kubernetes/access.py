"""How a worker gets into a cluster: the account of its own Pod, or a kubeconfig.

A kubeconfig may hold a token, a file that holds one, or a client certificate. Programs that are run for a token
(`exec`) and the older `auth-provider` are not supported: a worker is a service, and has an account of its own.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orchestrator.plugins.executors.kubernetes import ACCOUNT, has_account, kubeconfig
from orchestrator.workers.executors.protocol import Unequipped
from orchestrator.workers.executors.rest import Api, Token

_TOKEN_KEPT = 60.0
"""Seconds after which a file that holds a token is read again: Kubernetes replaces it in time."""


class Cluster(NamedTuple):
    """An API of Kubernetes, and our namespace."""

    api: Api
    namespace: str


def find_cluster(context: str, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Cluster:
    """Return the cluster of a context; where none is named, that of the worker's own Pod, or of its kubeconfig."""
    if not context and has_account(environ, account):
        return _own(environ, account)
    return _configured(kubeconfig(environ), context)


def _own(environ: Mapping[str, str], account: Path) -> Cluster:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    authority = f"[{host}]" if ":" in host else host
    tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    return Cluster(Api(url=f"https://{authority}:{port}", tls=tls, token=_TokenFile(account / "token")), namespace)


def _configured(path: Path, context: str) -> Cluster:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unequipped(
            f"This worker knows no cluster: it runs in no Pod with an account, and there is no kubeconfig at {path}. "
            f"Set KUBECONFIG in its environment."
        ) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise Unequipped(f"The kubeconfig {path} cannot be read: {error}.") from None
    config = _Kubeconfig(path, document if isinstance(document, dict) else {})
    chosen = config.named("contexts", "context", context or str(config.document.get("current-context") or ""))
    cluster = config.named("clusters", "cluster", str(chosen.get("cluster", "")))
    user = config.named("users", "user", str(chosen["user"])) if chosen.get("user") else {}
    for unsupported in ("exec", "auth-provider", "username"):
        if unsupported in user:
            raise Unequipped(
                f"The kubeconfig {path} lets its user in by {unsupported!r}, which workers do not support: give them a "
                f"token, a file that holds one, or a client certificate."
            )
    url = str(cluster.get("server", ""))
    if not url.startswith(("http://", "https://")):
        raise Unequipped(f"The kubeconfig {path} names no server with an address that begins with https://.")
    tls = config.tls(cluster, user) if url.startswith("https://") else None
    name = cluster.get("tls-server-name")
    api = Api(url=url.rstrip("/"), tls=tls, server_name=name, token=config.token(user))
    return Cluster(api, str(chosen.get("namespace") or "default"))


class _Kubeconfig(NamedTuple):
    path: Path
    document: Mapping[str, Any]

    def named(self, kind: str, field: str, name: str) -> Mapping[str, Any]:
        """Return an entry of the file by its name."""
        entries = self.document.get(kind) or []
        for entry in entries:
            if entry.get("name") == name:
                return entry.get(field) or {}
        known = ", ".join(str(entry.get("name")) for entry in entries) or "none"
        raise Unequipped(f"The kubeconfig {self.path} has no {field} {name!r} among its {kind}: {known}.")

    def tls(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
        """Return how https is spoken with a cluster."""
        authorities = self._bytes(cluster, "certificate-authority")
        tls = ssl.create_default_context(cadata=None if authorities is None else authorities.decode())
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        certificate, key = self._bytes(user, "client-certificate"), self._bytes(user, "client-key")
        if certificate is not None and key is not None:
            with tempfile.NamedTemporaryFile(prefix="kube-") as file:  # which only its owner can read
                file.write(certificate + b"\n" + key)
                file.flush()
                tls.load_cert_chain(file.name)
        return tls

    def token(self, user: Mapping[str, Any]) -> Token | None:
        """Return what gives a user's token, if it has one."""
        if user.get("tokenFile"):
            return _TokenFile(self.path.parent / str(user["tokenFile"]))
        if user.get("token"):
            return _FixedToken(str(user["token"]))
        return None

    def _bytes(self, entry: Mapping[str, Any], field: str) -> bytes | None:
        """Return what an entry holds itself, or names a file for."""
        try:
            if entry.get(f"{field}-data"):
                return base64.b64decode(str(entry[f"{field}-data"]), validate=True)
            return (self.path.parent / str(entry[field])).read_bytes() if entry.get(field) else None
        except (OSError, binascii.Error) as error:
            raise Unequipped(f"The {field} of the kubeconfig {self.path} cannot be read: {error}.") from None


class _FixedToken:
    """A token that stands in the kubeconfig."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def __call__(self) -> str:
        return self._token

    def forget(self, refused: str) -> bool:  # noqa: ARG002
        """There is no other."""
        return False


class _TokenFile:
    """A token that is replaced in its file from time to time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._since = -_TOKEN_KEPT

    async def __call__(self) -> str:
        if time.monotonic() - self._since >= _TOKEN_KEPT:
            try:
                self._token = self._path.read_text(encoding="utf-8").strip()  # of a small file, which is in memory
            except OSError as error:
                raise Unequipped(f"The token of Kubernetes cannot be read: {error}.") from None
            self._since = time.monotonic()
        return self._token

    def forget(self, refused: str) -> bool:
        """Read the file again next time: it may hold another one by now."""
        if refused == self._token:
            self._since = -_TOKEN_KEPT
        return True
