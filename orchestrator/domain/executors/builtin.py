"""The options of the executors http, process and pull, and the HTTP executor's requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orchestrator.domain.executors.options import Broken, Execution, ExecutorOptions, strict_json
from orchestrator.domain.executors.services import address_problem, service_problem
from orchestrator.domain.plain import anchored

_MAX_SECONDS = 86_400.0
_RAW_NAMES = {"input", "params"}
_BUSY = (404, 429, 502, 503, 504)
"""Status codes after which another worker is asked: this one does not know the service, or cannot serve it now."""
_MAX_LINES = 1_000
_MAX_TEXT = 4_000
"""Characters of an error message that are kept."""
_MAX_KIND = 100
_MAX_DELAY = 1e9


class Http(ExecutorOptions, frozen=True, kw_only=True):
    """A request `POST /exec/<service>`, answered with `{"result": …, "error": ""}`."""

    executor: ClassVar[str] = "http"

    service: str = ""
    """The name of the service. Default: the name of the task."""
    url: str = ""
    """The base URL, to which `/exec/<service>` is appended. By default, a registered worker of the service is asked."""
    params: dict[str, Any] = {}
    """Parameters sent beside the input."""
    weighted_by_load: bool = True
    """Prefer services with a lower load."""
    max_attempts: int | None = None
    """Requests that may find no available service before the task fails. By default, only the timeout limits them."""
    attempt_delay: float = 0.2
    """Seconds between two requests that find no available service."""
    request_timeout: float | None = None
    """Seconds to wait for an answer before another worker is asked. By default, only the task's timeout limits it."""

    def problems(self) -> list[tuple[str, str]]:
        """Return problems that types cannot express."""
        problems = []
        if self.service and (problem := service_problem(self.service)):
            problems.append(("service", problem))
        if self.url and (problem := address_problem(self.url)):
            problems.append(("url", problem))
        if self.max_attempts is not None and not 1 <= self.max_attempts <= 1_000:
            problems.append(("max_attempts", f"expected 1 to 1000, found {self.max_attempts}"))
        if not 0 <= self.attempt_delay <= _MAX_SECONDS:
            problems.append(
                ("attempt_delay", f"expected seconds, 0 to {_MAX_SECONDS:,.0f}, found {self.attempt_delay:g}")
            )
        if self.request_timeout is not None and not 0 < self.request_timeout <= _MAX_SECONDS:
            expected = f"expected seconds, more than 0 and up to {_MAX_SECONDS:,.0f}"
            problems.append(("request_timeout", f"{expected}, found {self.request_timeout:g}"))
        return problems


def service_of(execution: Execution, options: Http) -> str:
    return options.service or execution.task


def request_body(execution: Execution, constants: Mapping[str, Any]) -> bytes:
    """Return the request body. `constants` are the `params` of the options.

    Arguments named only `input` and `params` are sent unchanged, so that a service can get a list or any other input. A
    single positional argument is the whole input.
    """
    names, positional = set(execution.input), execution.arguments
    params: Any = {}
    if "input" in names and names <= _RAW_NAMES and not positional:
        sent, params = execution.input["input"], execution.input.get("params") or {}
    elif len(positional) == 1 and names <= {"params"}:
        sent, params = positional[0], execution.input.get("params") or {}
    else:
        sent = execution.input
    merged = {**constants, **params} if isinstance(params, dict) else params
    body = {"input": sent, "params": merged, "request_id": execution.name}
    if positional and sent is execution.input:
        body["arguments"] = positional
    return strict_json(body, f"What task {execution.task!r} sends to its service")


class TryAnotherWorker(Exception):
    """The answer does not concern the work itself: another worker is asked."""


def read_answer(status: int, body: bytes, who: str) -> Any | Broken:
    """Return the result in a service's answer, or the failure that it reports.

    Raise `TryAnotherWorker` if it holds neither.
    """
    if status in _BUSY:
        raise TryAnotherWorker(f"{who} answered with status {status}")
    if 300 <= status < 400:
        return Broken("BadAnswer", f"{who} answered with status {status}: redirects are not followed.", retryable=False)
    is_good = 200 <= status < 300
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = None
    if isinstance(data, dict) and data.get("error"):
        error = data["error"]
        return reported(error if isinstance(error, dict) else {**data, "message": error}, retryable=_may_retry(status))
    if not is_good:
        excerpt = body[:200].decode("utf-8", "replace")
        return Broken("BadAnswer", f"{who} answered with status {status}: {excerpt!r}.", retryable=status >= 500)
    if not isinstance(data, dict) or "result" not in data:
        excerpt = body[:200].decode("utf-8", "replace")
        return Broken(
            "BadAnswer",
            f"{who} did not answer with an object with `result` and `error`: {excerpt!r}.",
        )
    return data["result"]


def log_lines(body: bytes) -> list[str]:
    """Return the log lines that a service has sent beside its result, as `logs`."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    lines = answer.get("logs") if isinstance(answer, dict) else None
    return [_text(line) for line in lines[:_MAX_LINES]] if isinstance(lines, list) else []


def _may_retry(status: int) -> bool:
    return not 400 <= status < 500


def reported(error: Any, *, retryable: bool = True) -> Broken:
    """Return the failure that a service reports: a text, or an object with `kind`, `message`, `retryable`,
    `retry_after` and `detail`.

    With a text, the other fields may stand beside `error` in the answer.
    """
    if not isinstance(error, dict):
        return Broken("ServiceError", _text(error), retryable)
    kind, retry = error.get("kind"), error.get("retryable")
    return Broken(
        _text(kind)[:_MAX_KIND] if isinstance(kind, str) and kind.isprintable() and kind else "ServiceError",
        _text(error.get("message", error)),
        retry if isinstance(retry, bool) else retryable,
        _text(error.get("detail") or ""),
        _delay(error.get("retry_after")),
    )


def _delay(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _MAX_DELAY else None


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text.replace("\0", "�")[:_MAX_TEXT]


# -- the executor `process`: a command that the operator of the workers has allowed

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Size = Annotated[int, Meta(ge=1)]


class Process(ExecutorOptions, frozen=True, kw_only=True):
    """Runs a command on the worker's machine, in a process group of its own. The exit code decides."""

    executor: ClassVar[str] = "process"
    is_local: ClassVar[bool] = True

    command: Annotated[list[Annotated[str, Meta(pattern=r"^[^\x00]*$")]], Meta(min_length=1, max_length=1_000)]
    """The program and its arguments, without a shell. Workers run only programs that `--allow-command` names."""
    input: Literal["stdin", "file", "none"] = "stdin"
    """How the program gets its input: as JSON on standard input, or in the file at `TASK_SPEC_PATH`. The file always
    exists, and holds everything known about the task."""
    output: Literal["json", "text", "last_line", "none"] = "json"
    """The format of standard output: one JSON document, text, log lines followed by a line of JSON, or nothing."""
    env: dict[str, str] = {}
    """Environment variables beside `PATH`, `HOME`, `LANG`, `TZ` and `TASK_…`. The worker's others are not passed."""
    cwd: str | None = None
    """The working directory. Default: a temporary directory, removed afterwards."""
    retry_on: list[Annotated[int, Meta(ge=1, le=255)]] | None = None
    """Exit codes that are retried. Default: all."""
    grace: _Seconds = 10.0
    """Seconds between SIGTERM and SIGKILL when the program is stopped."""
    memory: _Size | None = None
    """Bytes of address space for each process of the program, at most."""
    cpu: Annotated[int, Meta(ge=1)] | None = None
    """Seconds of CPU time for each process of the program, at most."""
    files: _Size | None = None
    """Open files of each process of the program, at most."""

    user: Annotated[str, Meta(pattern=anchored(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"))] | None = None
    """The user that the program runs as, which requires a worker that runs as root. Default: the worker's user."""

    @property
    def wants(self) -> str:
        """The program: workers announce the programs that they may run."""
        return f"process {self.command[0]}"

    def problems(self) -> list[tuple[str, str]]:
        """Return problems that types cannot express."""
        program = self.command[0] if self.command else ""
        if not program or len(program) > 200 or "*" in program or ".." in program.split("/"):
            return [("command", "expected a program of 1 to 200 characters, without * and .., as its first word.")]
        if unnamed := [name for name in self.env if not name or "=" in name]:
            return [("env", f"{unnamed[0]!r} cannot be set as a variable here.")]
        if loading := [name for name in self.env if name.startswith(("LD_", "DYLD_"))]:
            return [("env", f"{loading[0]} could make the program run different code, so it cannot be set.")]
        if self.cwd is not None and not self.cwd.startswith("/"):
            return [("cwd", f"expected a path from the root, such as /srv/jobs, found {self.cwd!r}.")]
        return []


# -- the executor `pull`: programs in any language, perhaps behind a firewall, that poll for work

MAX_BODY = 64_000_000
"""Bytes of JSON sent to a program, at most, if the input is in the payload store."""


class Pull(ExecutorOptions, frozen=True, kw_only=True):
    """Work that is leased to a program that polls for it with `POST /queue/poll`."""

    executor: ClassVar[str] = "pull"

    service: str = ""
    """The name of the service. Default: the name of the task."""
    params: dict[str, Any] = {}
    """Parameters sent beside the input."""
    lease: float = 60.0
    """Seconds without a heartbeat after which the work is offered again."""
    max_leases: int = 3
    """Leases that may expire, one after another, before the task fails."""

    def problems(self) -> list[tuple[str, str]]:
        """Return problems that types cannot express."""
        problems = []
        if self.service and (problem := service_problem(self.service)):
            problems.append(("service", problem))
        if not 1 <= self.lease <= 86_400:
            problems.append(("lease", f"expected seconds, 1 to 86,400, found {self.lease:g}"))
        if not 1 <= self.max_leases <= 1_000:
            problems.append(("max_leases", f"expected 1 to 1000, found {self.max_leases}"))
        return problems


def service_of_pull(execution: Execution, options: Pull) -> str:
    """Return the name of the service under which the work is offered."""
    return options.service or execution.task
