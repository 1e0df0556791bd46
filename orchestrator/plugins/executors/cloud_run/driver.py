"""Tasks that run as executions of Cloud Run jobs, over Google's HTTP API (version 2).

Google names executions itself. Our name is passed in an environment variable, and an execution with that variable is
searched before a new one is started. A new execution appears in the list within seconds: two workers that submit the
same name within that time may run it twice. One periodic list serves all awaited executions of a job.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import urlencode, urlsplit

from orchestrator.domain.executors.options import OUTPUT_VARIABLE, Broken, Execution, Finished, Outcome
from orchestrator.errors import GiveUp
from orchestrator.plugins.executors.cloud_run import OWN_VARIABLE, CloudRun
from orchestrator.workers.executors.asking import Answer
from orchestrator.workers.executors.left_outputs import ExecutionFolders
from orchestrator.workers.executors.protocol import Gone, Poller, Setup, Unequipped, Unreachable, Watcher
from orchestrator.workers.executors.rest import Api, refusal

MAX_VARIABLE = 32_000
"""Bytes of input in a variable, at most. Cloud Run allows 32 KiB."""
_POLL_INTERVAL = 2.0
"""Seconds between two lists of executions."""
_PAGE = "500"
_TRIES = 4
_PAUSE = 0.5
_MAX_PAUSE = 60.0
_TEMPORARY = (401, 403, 408, 429)
_ENDPOINT = "https://run.googleapis.com/"

ListedExecution = Mapping[str, Any]


class CloudRunExecutor:
    """Runs jobs of Cloud Run, and watches their executions."""

    options: ClassVar[type[CloudRun]] = CloudRun

    def __init__(self, setup: Setup) -> None:
        self._settings = setup.settings
        self._stored_outputs = ExecutionFolders(self._settings)
        self._jobs: dict[str, _CloudJob] = {}
        self._token = GoogleToken()

    async def submit(self, execution: Execution) -> str:
        """Run the job, unless it has an execution with our name."""
        job, options = self._job(execution)
        size = len(execution.specification)
        if size > MAX_VARIABLE:
            raise GiveUp(
                f"The input of {execution.task} has {size:,} bytes, and Cloud Run takes {MAX_VARIABLE:,}: pass a "
                f"reference to the data instead."
            )
        found = await job.poll.next(execution.name)
        if found is None:
            output = self._stored_outputs.address(execution) if options.output == "store" else ""
            answer = await job.ask("POST", ":run", body=_overrides(execution, options, output), tries=1)
            if answer.status != 200:
                raise _refusal(answer, f"run the job {options.path}")
            found = (answer.data or {}).get("metadata") or {}
        if not found.get("name"):
            raise Unreachable(f"Google did not return which execution of {options.path} it started.")
        return str(found["name"])

    async def watch(self, execution: Execution, external_id: str, watcher: Watcher) -> Outcome:
        """Wait until the execution has ended, and return its outcome. Log the address of its log at once."""
        job, options = self._job(execution)
        is_logged = False
        while True:
            found = await job.poll.next(external_id)
            if found is None:
                raise Gone(f"Google has no execution {external_id} any longer: it was deleted.")
            if not is_logged and found.get("logUri"):
                watcher.log(f"The log of the execution is at {found['logUri']}")
                is_logged = True
            if (outcome := _outcome_of(found)) is not None:
                return await self._stored_outputs.outcome(execution, outcome) if options.output == "store" else outcome

    async def cancel(self, execution: Execution, external_id: str) -> None:
        """Cancel the execution. Return when it has ended."""
        job, options = self._job(execution)
        is_requested = False
        while (found := await job.poll.next(external_id or execution.name)) is not None and _outcome_of(found) is None:
            if not is_requested:
                name = str(found["name"]).rpartition("/")[2]
                answer = await job.ask("POST", f"/executions/{name}:cancel", body={})
                if answer.status not in (200, 400, 404, 409):  # some of these mean that it has ended meanwhile
                    raise _refusal(answer, f"cancel an execution of {options.path}")
                is_requested = True
        await self.release(execution, external_id)

    async def release(self, execution: Execution, external_id: str) -> None:  # noqa: ARG002
        """Delete the stored result. The execution stays in Google's history of the last thousand."""
        if cast(CloudRun, execution.options).output == "store":
            await self._stored_outputs.delete(execution)

    async def close(self) -> None:
        """Stop watching. Executions continue."""
        for job in self._jobs.values():
            await job.poll.close()
        self._jobs.clear()

    def _job(self, execution: Execution) -> tuple[_CloudJob, CloudRun]:
        options = cast(CloudRun, execution.options)
        if options.path not in self._jobs:
            url = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_RUN", _ENDPOINT).rstrip("/")
            api = Api(url=url, token=self._token, timeout=self._settings.executor_timeout)
            self._jobs[options.path] = _CloudJob(api, options.path)
        return self._jobs[options.path], options


class _CloudJob:
    """A job, and the periodic list of its executions."""

    def __init__(self, api: Api, path: str) -> None:
        self._api = api
        self._path = path
        self.poll: Poller[ListedExecution] = Poller(self._list, _POLL_INTERVAL)

    async def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None, *, tries: int = _TRIES
    ) -> Answer:
        """Send a request, and retry it while Google is busy or broken. `tries` limits retries with possible effects."""
        pause = _PAUSE
        for number in range(1, _TRIES + 1):
            answer = await self._api.ask(method, f"/v2/{self._path}{path}", query, body)
            is_busy = answer.status == 429  # such a request had no effect
            if not is_busy and (answer.status < 500 or number >= tries):
                return answer
            if number < _TRIES:
                await asyncio.sleep(_retry_delay(answer, pause))
                pause *= 2
        return answer

    async def _list(self, names: Collection[str]) -> Mapping[str, ListedExecution]:
        """Return executions by our name and by Google's, reading pages until all are found."""
        seen: dict[str, ListedExecution] = {}
        query = {"pageSize": _PAGE}
        while True:
            answer = await self.ask("GET", "/executions", query)
            if answer.status != 200:
                raise _refusal(answer, f"list the executions of {self._path}")
            for found in answer.data.get("executions") or ():
                for name in (_name_of(found), str(found.get("name", ""))):
                    if name in names:
                        seen[name] = found
            token = answer.data.get("nextPageToken")
            if not token or len(seen) == len(names):
                return seen
            query["pageToken"] = str(token)


def _retry_delay(answer: Answer, pause: float) -> float:
    """Return the delay that Google requests, or else a random one around `pause`."""
    try:
        return min(float(answer.headers["retry-after"]), _MAX_PAUSE)
    except (KeyError, ValueError):
        return pause * random.uniform(0.75, 1.25)


def _refusal(answer: Answer, what: str) -> Exception:
    data = answer.data
    message = data.get("error", {}).get("message", "") if isinstance(data, dict) else ""
    return refusal(answer, f"Google does not {what}", message, _TEMPORARY)


def _overrides(execution: Execution, options: CloudRun, output: str = "") -> dict[str, Any]:
    """Return the overrides for running the job. With `output`, the job leaves its output at that address."""
    variables = {
        **options.env,
        OWN_VARIABLE: execution.name,
        "TASK_ID": execution.task_id,
        "TASK_ATTEMPT": str(execution.attempt),
        "TASK_SPEC": execution.specification.decode(),
        **({OUTPUT_VARIABLE: output} if output else {}),
    }
    container: dict[str, Any] = {"env": [{"name": name, "value": value} for name, value in variables.items()]}
    if options.container:
        container["name"] = options.container
    if options.args:
        container["args"] = options.args
    overrides: dict[str, Any] = {"containerOverrides": [container]}
    if options.tasks is not None:
        overrides["taskCount"] = options.tasks
    limit = options.timeout if options.timeout is not None else options.backstop(execution.timeout)
    if limit is not None:
        overrides["timeout"] = f"{limit:.3f}s"
    return {"overrides": overrides}


def _name_of(found: Mapping[str, Any]) -> str:
    """Return our name of an execution in Google's list; empty if it is not ours."""
    for container in found.get("template", {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == OWN_VARIABLE:
                return str(variable.get("value", ""))
    return ""


def _outcome_of(found: Mapping[str, Any]) -> Outcome | None:
    """Return how an execution ended; None if it has not."""
    if not found.get("completionTime"):
        return None
    completed: Mapping[str, Any] = next(
        (condition for condition in found.get("conditions") or () if condition.get("type") == "Completed"), {}
    )
    if completed.get("state") == "CONDITION_SUCCEEDED":
        return Finished()
    if found.get("cancelledCount"):
        return Broken("ExecutionCancelled", "The execution was cancelled at Google.", False)
    why = completed.get("message") or completed.get("executionReason") or "and Google gives no reason"
    count = f"{found.get('failedCount', 0)} of {found.get('taskCount', 1)} tasks failed"
    return Broken("ExecutionFailed", f"The execution failed: {why} ({count}).", detail=str(found.get("logUri", "")))


_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_RENEWAL_MARGIN = 120.0
"""Seconds before its expiry at which a token is replaced."""
_METADATA = "metadata.google.internal"


class GoogleToken:
    """Returns a token that is valid for some minutes. Concurrent callers share one request."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._token = ""
        self._expires_at = 0.0
        self._lock = asyncio.Lock()

    async def __call__(self) -> str:
        async with self._lock:
            if time.monotonic() >= self._expires_at - _RENEWAL_MARGIN:
                file = self._environ.get("GOOGLE_APPLICATION_CREDENTIALS")
                answer = await (self._from_key_file(Path(file)) if file else self._from_metadata_server())
                data = answer.data
                if answer.status != 200 or not isinstance(data, dict) or "access_token" not in data:
                    raise Unreachable(f"Google issued no token: it answered with status {answer.status}.")
                self._token = str(data["access_token"])
                self._expires_at = time.monotonic() + float(data.get("expires_in", 0))
        return self._token

    def forget(self, refused: str) -> bool:
        """Get a new token next time. Google refuses this one: it was revoked, or the account's keys were replaced.

        If several callers were refused at once, only the first call has an effect.
        """
        if refused == self._token:
            self._expires_at = 0.0
        return True

    async def _from_metadata_server(self) -> Answer:
        host = self._environ.get("GCE_METADATA_HOST", _METADATA)
        api = Api(url=f"http://{host}", headers={"Metadata-Flavor": "Google"}, timeout=5.0)
        try:
            return await api.ask("GET", "/computeMetadata/v1/instance/service-accounts/default/token")
        except Unreachable as error:
            raise Unreachable(
                f"This worker has no Google Cloud account: it does not run on Google Cloud ({error}), and "
                f"GOOGLE_APPLICATION_CREDENTIALS is not set to a file."
            ) from error

    async def _from_key_file(self, path: Path) -> Answer:
        try:
            key = json.loads(path.read_text(encoding="utf-8"))
            uri, assertion = str(key["token_uri"]), _signed(key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unequipped(
                f"The file {path} that GOOGLE_APPLICATION_CREDENTIALS names is not a key of a service account: "
                f"{error!r}."
            ) from None
        form = urlencode({"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion})
        parts = urlsplit(uri)
        api = Api(url=f"{parts.scheme}://{parts.netloc}")
        return await api.ask("POST", parts.path, body=form.encode(), content_type="application/x-www-form-urlencoded")


def _signed(key: Mapping[str, Any]) -> str:
    """Return the JWT claim of a service account, signed with its key."""
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import padding, rsa
    except ModuleNotFoundError:
        raise Unequipped("The key of a service account needs: pip install 'durable-orchestrator[cloud_run]'.") from None
    now = int(time.time())
    claim = {"iss": key["client_email"], "scope": _SCOPE, "aud": key["token_uri"], "iat": now, "exp": now + 3_600}
    head = {"alg": "RS256", "typ": "JWT", "kid": key.get("private_key_id", "")}
    text = f"{_part(head)}.{_part(claim)}"
    private = serialization.load_pem_private_key(str(key["private_key"]).encode(), password=None)
    if not isinstance(private, rsa.RSAPrivateKey):
        raise ValueError("its key is not an RSA key")
    return f"{text}.{_base64(private.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _part(value: Mapping[str, Any]) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
