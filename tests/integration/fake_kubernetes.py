"""A fake of the part of the Kubernetes API that Jobs need; containers are processes.

Requests are validated against the models of the `kubernetes` package: an unknown field or parameter, or a value of
another type, is rejected, as by a strict server.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1)/namespaces/(?P<space>[^/]+)/(?P<kind>jobs|pods|secrets|configmaps)"
    r"(?:/(?P<name>[^/]+)(?P<log>/log)?)?"
)
_MODELS = {"jobs": "V1Job", "secrets": "V1Secret", "configmaps": "V1ConfigMap"}
_LISTING = {"labelSelector", "limit", "continue", "watch", "allowWatchBookmarks", "resourceVersion", "timeoutSeconds"}
_LOG = {"container", "tailLines", "limitBytes", "follow", "timestamps", "sinceSeconds", "previous"}


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_model(kind: str, value: Any, path: str = "") -> None:
    """Reject a value that does not match a model of the API."""
    if (listed := re.fullmatch(r"[Ll]ist\[(.*)\]", kind)) is not None:
        if not isinstance(value, list):
            raise Refused(400, f"{path}: expected a list")
        for number, item in enumerate(value):
            check_model(listed[1], item, f"{path}[{number}]")
    elif (mapped := re.fullmatch(r"[Dd]ict[\[(]str, (.*)[\])]", kind)) is not None:
        for name, item in value.items():
            check_model(mapped[1], item, f"{path}.{name}")
    elif kind in ("str", "int", "bool", "float"):
        expected_type: Any = {"str": str, "int": int, "bool": bool, "float": (int, float)}[kind]
        if not isinstance(value, expected_type) or (kind == "int" and isinstance(value, bool)):
            raise Refused(400, f"{path}: expected {kind}, found {value!r}")
    elif (model := getattr(import_module("kubernetes.client.models"), kind, None)) is not None:  # a slow import
        names = {json_name: name for name, json_name in model.attribute_map.items()}
        for name, item in value.items():
            if name not in names:
                raise Refused(400, f'strict decoding error: unknown field "{path}.{name}"')
            check_model(model.openapi_types[names[name]], item, f"{path}.{name}")


class FakeKubernetes(http.server.ThreadingHTTPServer):
    """An API server with one node."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.changed = threading.Condition()
        self.version = 1_000
        self.things: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.events: list[tuple[int, str, str, dict[str, Any]]] = []
        self.forgotten = 0
        self.cut = 0
        self.is_away = False
        self.created: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.watching = 0
        self.token = ""
        self._logs: dict[str, bytes] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="fake-kubernetes-")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None: ...

    @property
    def url(self) -> str:
        return f"http{'s' if isinstance(self.socket, ssl.SSLSocket) else ''}://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with self.changed:
            self.cut += 1
            self.changed.notify_all()
        self.shutdown()
        self.server_close()
        self._folder.cleanup()

    def forget(self) -> None:
        """Expire the event history, and end all watches."""
        with self.changed:
            self.forgotten = self.version
            self.cut += 1
            self.changed.notify_all()

    def cut_watches(self) -> None:
        with self.changed:
            self.cut += 1
            self.changed.notify_all()

    def put(self, kind: str, space: str, resource: dict[str, Any], event: str) -> dict[str, Any]:
        """Store or delete an object, and notify the watches."""
        with self.changed:
            self.version += 1
            resource = json.loads(json.dumps(resource))
            resource["metadata"]["resourceVersion"] = str(self.version)
            key = (kind, space, resource["metadata"]["name"])
            if event == "DELETED":
                self.things.pop(key, None)
            else:
                self.things[key] = resource
            self.events.append((self.version, f"{space}/{kind}", event, resource))
            self.changed.notify_all()
            return resource

    def create(self, kind: str, space: str, body: dict[str, Any]) -> dict[str, Any]:
        check_model(_MODELS[kind], body)
        name = body["metadata"]["name"]
        with self.changed:
            if (kind, space, name) in self.things:
                raise Refused(409, f'{kind} "{name}" already exists')
            if space == "nowhere":
                raise Refused(404, f'namespaces "{space}" not found')
            if space == "full":
                raise Refused(403, "exceeded quota: jobs")
            body["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": space, "creationTimestamp": _now()}
            body["status"] = {}
            self.created[name] += kind == "jobs"
            resource = self.put(kind, space, body, "ADDED")
        if kind == "jobs":
            threading.Thread(target=self._run, args=(space, resource), daemon=True).start()
        return resource

    def _run(self, space: str, job: dict[str, Any]) -> None:
        """Run the pod of one Job, as the controller and the node do."""
        name = job["metadata"]["name"]
        template, spec = job["spec"]["template"], job["spec"]["template"]["spec"]
        [container] = spec["containers"]
        pod = {
            "metadata": {**template["metadata"], "name": f"{name}-abcde"[-63:], "creationTimestamp": _now()},
            "spec": spec,
        }
        image = container["image"]
        if image.startswith("bad ") or image.startswith("missing"):
            reason = "InvalidImageName" if image.startswith("bad ") else "ImagePullBackOff"
            pod["status"] = _state(waiting={"reason": reason, "message": f"cannot pull {image}"})
            self.put("pods", space, pod, "ADDED")
            return
        folder = Path(self._folder.name, name)
        folder.mkdir()
        variables = {one["name"]: one["value"] for one in container.get("env", ())}
        if "TASK_SPEC_PATH" in variables:
            [volume] = spec["volumes"]
            [kind, source] = next(item for item in volume.items() if item[0] != "name")
            file = self.things["secrets" if kind == "secret" else "configmaps", space, name]
            assert source in ({"secretName": name}, {"name": name})
            variables["TASK_SPEC_PATH"] = str(folder / "task.json")
            (folder / "task.json").write_text((file.get("data") or file["stringData"])["task.json"])
        message, log = folder / "message", folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*container.get("command", ()), *container.get("args", ())],
                env={"PATH": os.environ["PATH"], "MESSAGE": str(message), **variables},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[name] = process
        pod["status"] = {"phase": "Running", **_state(running={"startedAt": _now()})}
        self.put("pods", space, pod, "ADDED")
        deadline = job["spec"].get("activeDeadlineSeconds")
        try:
            code, is_late = process.wait(deadline), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, is_late = process.wait(), True
        try:
            self._logs[pod["metadata"]["name"]] = log.read_bytes()
        except FileNotFoundError:
            return  # the server was stopped
        message_text = message.read_text()[:4_096] if message.exists() else ""
        ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Completed" if code == 0 else "Error"}
        pod["status"] = _state(terminated={**ended, **({"message": message_text} if message_text else {})})
        with self.changed:
            if ("pods", space, pod["metadata"]["name"]) not in self.things:
                return
            self.put("pods", space, pod, "MODIFIED")
            condition = {"type": "Complete" if code == 0 else "Failed", "status": "True", "lastTransitionTime": _now()}
            if code:
                condition["reason"] = "DeadlineExceeded" if is_late else "BackoffLimitExceeded"
            if ("jobs", space, name) in self.things:
                ended_job = {**self.things["jobs", space, name], "status": {"conditions": [condition]}}
                self.put("jobs", space, ended_job, "MODIFIED")

    def delete(self, kind: str, space: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if body:
            check_model("V1DeleteOptions", body)
        resource = self.things.get((kind, space, name))
        if resource is None:
            raise Refused(404, f'{kind} "{name}" not found')
        if kind != "jobs":
            return self.put(kind, space, resource, "DELETED")
        if "deletionTimestamp" not in resource["metadata"]:
            resource["metadata"]["deletionTimestamp"] = _now()
            self.put(kind, space, resource, "MODIFIED")
            is_foreground = body.get("propagationPolicy") == "Foreground"
            if not is_foreground:
                self.put(kind, space, resource, "DELETED")
            threading.Thread(target=self._end, args=(space, resource, is_foreground), daemon=True).start()
        return resource

    def _end(self, space: str, job: dict[str, Any], then_job: bool) -> None:
        name = job["metadata"]["name"]
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        for (kind, where, _), pod in list(self.things.items()):
            if kind == "pods" and where == space and pod["metadata"]["name"].startswith(name):
                self.put("pods", space, pod, "DELETED")
        if then_job:
            self.put("jobs", space, job, "DELETED")

    def has_pods(self) -> bool:
        return any(kind == "pods" for kind, _, _ in list(self.things))

    def has_changes(self, reached: int, cut: int) -> bool:
        return self.version > reached or self.cut != cut

    def listed(self, kind: str, space: str, selector: str) -> list[dict[str, Any]]:
        return [
            resource
            for (one, where, _), resource in sorted(self.things.items())
            if (one, where) == (kind, space) and matches(resource, selector)
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeKubernetes
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_PATCH(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None: ...

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.server.is_away:
                raise Refused(503, "the server is currently unable to handle the request")
            if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
                raise Refused(401, "Unauthorized")
            self._answer(json.loads(body) if body else {})
        except Refused as refusal:
            self._send(refusal.status, {"kind": "Status", "code": refusal.status, "message": str(refusal)})

    def _answer(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        query = {name: value for name, [value] in parse_qs(parts.query).items()}
        self.server.requests.append((self.command, parts.path))
        found = _PATH.fullmatch(parts.path)
        if found is None:
            raise Refused(404, f"the server could not find the requested resource {parts.path}")
        if not query.keys() <= (_LOG if found["log"] else _LISTING):
            raise Refused(400, f"unknown parameters {query}")
        space, kind, name = found["space"], found["kind"], found["name"]
        if self.command == "POST":
            self._send(201, self.server.create(kind, space, body))
        elif self.command == "DELETE":
            self._send(200, self.server.delete(kind, space, name, body))
        elif self.command == "PATCH":
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            resource = self.server.things[kind, space, name]
            for part, change in body.items():
                resource[part] |= change
            check_model(_MODELS[kind], {**resource, "metadata": resource["metadata"]})
            self._send(200, self.server.put(kind, space, resource, "MODIFIED"))
        elif found["log"]:
            lines = self.server._logs.get(name, b"").splitlines(keepends=True)
            self._send(200, b"".join(lines[-int(query["tailLines"]) :]))
        elif name:
            if (kind, space, name) not in self.server.things:
                raise Refused(404, f'{kind} "{name}" not found')
            self._send(200, self.server.things[kind, space, name])
        elif query.get("watch") == "true":
            self._watch(f"{space}/{kind}", query)
        else:
            with self.server.changed:
                items = self.server.listed(kind, space, query.get("labelSelector", ""))
                start, limit = int(query.get("continue", 0)), int(query.get("limit", 500))
                metadata = {"resourceVersion": str(self.server.version)}
                if start + limit < len(items):
                    metadata["continue"] = str(start + limit)
            self._send(200, {"items": items[start : start + limit], "metadata": metadata})

    def _watch(self, path: str, query: dict[str, str]) -> None:
        reached, server = int(query["resourceVersion"]), self.server
        deadline = time.monotonic() + float(query["timeoutSeconds"])
        with server.changed:
            cut = server.cut
            is_old = reached < server.forgotten
            server.watching += 1
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if is_old:
                gone = {"kind": "Status", "code": 410, "message": "too old resource version", "metadata": {}}
                self._chunk({"type": "ERROR", "object": gone})
            while not is_old and server.cut == cut and time.monotonic() < deadline:
                with server.changed:
                    server.changed.wait_for(partial(server.has_changes, reached, cut), 1.0)
                    events = [one for one in server.events if one[0] > reached]
                    reached = server.version
                if server.cut != cut:
                    break
                for _, where, event, resource in events:
                    if where == path and matches(resource, query.get("labelSelector", "")):
                        self._chunk({"type": event, "object": resource})
                self._chunk({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(reached)}}})
            self.wfile.write(b"0\r\n\r\n")
        finally:
            server.watching -= 1
            self.close_connection = True

    def _chunk(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, document: Any) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def matches(resource: dict[str, Any], selector: str) -> bool:
    name, equals, value = selector.partition("=")
    labels = resource["metadata"].get("labels", {})
    return not name or (name in labels and (not equals or labels[name] == value))


def _state(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "task", "state": state}]}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
