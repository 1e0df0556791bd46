"""Access to a Kubernetes cluster: by the account of the worker's own Pod, or by a kubeconfig.

A kubeconfig may contain a token, a token file or a client certificate. Programs that return tokens (`exec`) and the
older `auth-provider` are not supported: a worker is a service with an account of its own.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from orchestrator.plugins.executors.kubernetes import ACCOUNT, OWN_LABEL, has_account, kubeconfig
from orchestrator.telemetry import get_logger
from orchestrator.workers.executors.asking import Answer
from orchestrator.workers.executors.protocol import Unequipped, Unreachable
from orchestrator.workers.executors.rest import Api, Token

_TOKEN_TTL = 60.0
"""Seconds after which a token file is read again. Kubernetes replaces the token in time."""


class Cluster(NamedTuple):
    """The API of a cluster, and the default namespace."""

    api: Api
    namespace: str


def find_cluster(context: str, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Cluster:
    """Return the cluster of a context; by default that of the worker's Pod, or of the current context."""
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
            f"This worker knows no cluster: it does not run in a Pod with a service account, and there is no "
            f"kubeconfig at {path}. Set KUBECONFIG in its environment."
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
        entries = self.document.get(kind) or []
        for entry in entries:
            if entry.get("name") == name:
                return entry.get(field) or {}
        names = ", ".join(str(entry.get("name")) for entry in entries) or "none"
        raise Unequipped(f"The kubeconfig {self.path} has no {field} {name!r} among its {kind}: {names}.")

    def tls(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
        """Return the TLS settings for a cluster."""
        authorities = self._bytes(cluster, "certificate-authority")
        tls = ssl.create_default_context(cadata=None if authorities is None else authorities.decode())
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        certificate, key = self._bytes(user, "client-certificate"), self._bytes(user, "client-key")
        if certificate is not None and key is not None:
            with tempfile.NamedTemporaryFile(prefix="kube-") as file:  # readable only by its owner
                file.write(certificate + b"\n" + key)
                file.flush()
                tls.load_cert_chain(file.name)
        return tls

    def token(self, user: Mapping[str, Any]) -> Token | None:
        """Return a source of the user's token, if there is one."""
        if user.get("tokenFile"):
            return _TokenFile(self.path.parent / str(user["tokenFile"]))
        if user.get("token"):
            return _FixedToken(str(user["token"]))
        return None

    def _bytes(self, entry: Mapping[str, Any], field: str) -> bytes | None:
        """Return the data of a field, which is inline or in a file."""
        try:
            if entry.get(f"{field}-data"):
                return base64.b64decode(str(entry[f"{field}-data"]), validate=True)
            return (self.path.parent / str(entry[field])).read_bytes() if entry.get(field) else None
        except (OSError, binascii.Error) as error:
            raise Unequipped(f"The {field} of the kubeconfig {self.path} cannot be read: {error}.") from None


class _FixedToken:
    """A token written in the kubeconfig."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def __call__(self) -> str:
        return self._token

    def forget(self, refused: str) -> bool:  # noqa: ARG002
        return False


class _TokenFile:
    """A token in a file that is replaced from time to time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._since = -_TOKEN_TTL

    async def __call__(self) -> str:
        if time.monotonic() - self._since >= _TOKEN_TTL:
            try:
                self._token = self._path.read_text(encoding="utf-8").strip()  # a small file, and in memory
            except OSError as error:
                raise Unequipped(f"The token of Kubernetes cannot be read: {error}.") from None
            self._since = time.monotonic()
        return self._token

    def forget(self, refused: str) -> bool:
        """Read the file again next time, because it may contain another token by now."""
        if refused == self._token:
            self._since = -_TOKEN_TTL
        return True


log = get_logger("worker")

_PAGE = "500"
_WATCH_SECONDS = 240
"""Seconds for which Kubernetes keeps a watch open."""
_SILENCE = _WATCH_SECONDS + 30.0
_PAUSE = 0.2
_MAX_PAUSE = 30.0


class _Expired(Exception):
    """Kubernetes no longer has the resource version at which a watch would continue."""


class Followed:
    """The state of an execution that somebody waits for."""

    def __init__(self) -> None:
        self.job: Mapping[str, Any] | None = None
        self.pod: Mapping[str, Any] | None = None
        self.is_gone = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def update(self, kind: str, thing: Mapping[str, Any] | None) -> None:
        """Store the current state of a Job or Pod; None if it is gone."""
        if kind == "jobs":
            self.job, self.is_gone = thing, thing is None
        elif thing is not None or self.pod is None:
            self.pod = thing
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def change(self, within: float | None = None) -> None:
        """Wait until something has changed, or up to so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()
        if self._error is not None:
            raise self._error


class NamespaceWatch:
    """Watches the executions of one namespace, while somebody waits for any."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._followed: dict[str, set[Followed]] = {}
        self._watches: list[asyncio.Task[None]] = []

    @contextmanager
    def following(self, name: str) -> Iterator[Followed]:
        """Watch an execution within this block."""
        followed = Followed()
        self._followed.setdefault(name, set()).add(followed)
        if not self._watches:
            self._watches = [asyncio.create_task(self._follow(kind)) for kind in ("jobs", "pods")]
        try:
            yield followed
        finally:
            rest = self._followed[name] - {followed}
            if rest:
                self._followed[name] = rest
            else:
                del self._followed[name]
            if not self._followed:
                self._stop()

    async def close(self) -> None:
        watches = self._watches
        self._stop()
        if watches:
            await asyncio.wait(watches)

    def _stop(self) -> None:
        for task in self._watches:
            task.cancel()
        self._watches = []

    async def _follow(self, kind: str) -> None:
        version, pause = "", _PAUSE
        while True:
            try:
                if not version:
                    version = await self._list(kind)
                async for next_version in self._watch(kind, version):
                    version, pause = next_version, _PAUSE
                await asyncio.sleep(_PAUSE)
            except _Expired:
                version = ""
            except Exception as error:  # noqa: BLE001  # it is for those who wait
                if not isinstance(error, Unreachable):
                    log.warning("kubernetes.watch_failed kind=%s namespace=%s error=%r", kind, self._namespace, error)
                for name in list(self._followed):
                    for followed in self._followed[name]:
                        followed.fail(Unreachable(f"Kubernetes: {error}"))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)

    async def _list(self, kind: str) -> str:
        """Read all Jobs or Pods, and return the resource version at which a watch continues."""
        query, seen = {"labelSelector": OWN_LABEL, "limit": _PAGE}, set[str]()
        before = set(self._followed)
        while True:
            answer = await self._api.ask("GET", path_of(kind, self._namespace), query)
            data = self._data_of(answer)
            for thing in data.get("items") or ():
                seen |= self._update(kind, "", thing)
            more = data["metadata"].get("continue")
            if not more:
                break
            query["continue"] = more
        if kind == "jobs":
            for name in (before - seen) & set(self._followed):
                for followed in self._followed[name]:
                    if followed.job is not None:  # a new watcher without a Job is about to query it
                        followed.update(kind, None)
        return str(data["metadata"]["resourceVersion"])

    async def _watch(self, kind: str, version: str) -> AsyncIterator[str]:
        """Watch for changes, and yield the resource version after each."""
        query = {
            "labelSelector": OWN_LABEL,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with self._api.lines(path_of(kind, self._namespace), query, silence=_SILENCE) as (answer, lines):
            if answer.status != 200:
                self._data_of(answer)
            async for line in lines:
                event = msgspec.json.decode(line)
                thing = event["object"]
                if event["type"] == "ERROR":
                    self._data_of(Answer(int(thing.get("code", 500)), {}, msgspec.json.encode(thing)))
                if event["type"] != "BOOKMARK":
                    self._update(kind, event["type"], thing)
                yield str(thing["metadata"]["resourceVersion"])

    def _update(self, kind: str, event: str, thing: Mapping[str, Any]) -> set[str]:
        name = thing["metadata"].get("labels", {}).get(OWN_LABEL, "")
        for followed in self._followed.get(name, ()):
            followed.update(kind, None if event == "DELETED" else thing)
        return {name}

    def _data_of(self, answer: Answer) -> Any:
        if answer.status == 410:
            raise _Expired
        if answer.status != 200 or not isinstance(answer.data, dict):
            raise Unreachable(refusal_text(answer))
        return answer.data


def path_of(kind: str, namespace: str, name: str = "") -> str:
    group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
    return f"{group}/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def refusal_text(answer: Answer) -> str:
    """Return the reason that Kubernetes gives for refusing a request."""
    data = answer.data
    message = data.get("message") if isinstance(data, dict) else None
    return f"Kubernetes answered with status {answer.status}: {message or answer.body[:200].decode(errors='replace')}"
