"""Options of tasks that a service over HTTP does, its requests and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orchestrator.domain.executors.options import Broken, Execution, ExecutorOptions, strict_json
from orchestrator.domain.executors.services import address_problem, service_problem
from orchestrator.domain.plain import whole

_LONGEST = 86_400.0
_AS_THEY_ARE = {"input", "params"}
_BUSY = (404, 429, 502, 503, 504)
"""Answers that say that another worker should be asked: it does not know the service, or cannot serve it now."""
_MOST_LINES = 1_000
_LONGEST_SAID = 4_000
"""Characters of an error that are kept."""
_LONGEST_KIND = 100
_LONGEST_DELAY = 1e9


class Http(ExecutorOptions, frozen=True, kw_only=True):
    """A request `POST /exec/<service>`, answered with `{"result": …, "error": ""}`."""

    executor: ClassVar[str] = "http"

    service: str = ""
    """The service; default: the name of the task."""
    url: str = ""
    """Where it is, in front of `/exec/`; if it is not given, one of those that have registered for it is asked."""
    params: dict[str, Any] = {}
    """Sent beside the input."""
    weighted_by_load: bool = True
    """Prefer services with a lower load."""
    max_attempts: int | None = None
    """How many requests may find no service before this fails; by default they go on until the timeout."""
    attempt_delay: float = 0.2
    """Seconds between two of them."""
    request_timeout: float | None = None
    """Seconds within which an answer must be there, before another worker is asked; else only the timeout counts."""

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        found = []
        if self.service and (problem := service_problem(self.service)):
            found.append(("service", problem))
        if self.url and (problem := address_problem(self.url)):
            found.append(("url", problem))
        if self.max_attempts is not None and not 1 <= self.max_attempts <= 1_000:
            found.append(("max_attempts", f"expected 1 to 1000, found {self.max_attempts}"))
        if not 0 <= self.attempt_delay <= _LONGEST:
            found.append(("attempt_delay", f"expected seconds, 0 to {_LONGEST:,.0f}, found {self.attempt_delay:g}"))
        if self.request_timeout is not None and not 0 < self.request_timeout <= _LONGEST:
            expected = f"expected seconds, more than 0 and up to {_LONGEST:,.0f}"
            found.append(("request_timeout", f"{expected}, found {self.request_timeout:g}"))
        return found


def service_of(execution: Execution, options: Http) -> str:
    return options.service or execution.task


def request_body(execution: Execution, constants: Mapping[str, Any]) -> bytes:
    """Return what is sent; `constants` are params that the input has none of.

    Arguments that are called `input` and `params`, and nothing else, are sent as they are: so a service that takes a
    list, or anything but named values, can be asked. One argument without a name is the input by itself.
    """
    names, given = set(execution.input), execution.arguments
    params: Any = {}
    if "input" in names and names <= _AS_THEY_ARE and not given:
        sent, params = execution.input["input"], execution.input.get("params") or {}
    elif len(given) == 1 and names <= {"params"}:
        sent, params = given[0], execution.input.get("params") or {}
    else:
        sent = execution.input
    merged = {**constants, **params} if isinstance(params, dict) else params
    body = {"input": sent, "params": merged, "request_id": execution.name}
    if given and sent is execution.input:
        body["arguments"] = given
    return strict_json(body, f"What task {execution.task!r} sends to its service")


class Passed(Exception):
    """An answer that says nothing about the work: another service is asked."""


def read_answer(status: int, body: bytes, who: str) -> Any | Broken:
    """Return the result that a service has sent, or how it says that it failed; raise `Passed` if it says neither."""
    if status in _BUSY:
        raise Passed(f"{who} answered with status {status}")
    if 300 <= status < 400:
        return Broken("BadAnswer", f"{who} answered with status {status}: redirects are not followed.", retryable=False)
    is_good = 200 <= status < 300
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    if isinstance(said, dict) and said.get("error"):
        error = said["error"]
        return reported(error if isinstance(error, dict) else {**said, "message": error}, retryable=_may_retry(status))
    if not is_good:
        shown = body[:200].decode("utf-8", "replace")
        return Broken("BadAnswer", f"{who} answered with status {status}: {shown!r}.", retryable=status >= 500)
    if not isinstance(said, dict) or "result" not in said:
        shown = body[:200].decode("utf-8", "replace")
        return Broken(
            "BadAnswer",
            f"{who} answered with something else than an object with `result` and `error`: {shown!r}.",
        )
    return said["result"]


def said_lines(body: bytes) -> list[str]:
    """Return the lines of a log that a service has sent beside its result, as `logs`."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    lines = said.get("logs") if isinstance(said, dict) else None
    return [_text(line) for line in lines[:_MOST_LINES]] if isinstance(lines, list) else []


def _may_retry(status: int) -> bool:
    return not 400 <= status < 500


def reported(error: Any, *, retryable: bool = True) -> Broken:
    """Return a failure that a service reports: a text, or an object with `kind`, `message`, `retryable`, `retry_after`
    and `detail`.

    A service may also say all but the message beside the text.
    """
    if not isinstance(error, dict):
        return Broken("ServiceError", _text(error), retryable)
    kind, may = error.get("kind"), error.get("retryable")
    return Broken(
        _text(kind)[:_LONGEST_KIND] if isinstance(kind, str) and kind.isprintable() and kind else "ServiceError",
        _text(error.get("message", error)),
        may if isinstance(may, bool) else retryable,
        _text(error.get("detail") or ""),
        _delay(error.get("retry_after")),
    )


def _delay(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _LONGEST_DELAY else None


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text.replace("\0", "�")[:_LONGEST_SAID]


# -- the options of the executor `process`: a command that the operator of the workers allowed

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Size = Annotated[int, Meta(ge=1)]


class Process(ExecutorOptions, frozen=True, kw_only=True):
    """Runs a command on the worker's machine, in a process group of its own. The exit code decides."""

    executor: ClassVar[str] = "process"
    is_local: ClassVar[bool] = True

    command: Annotated[list[Annotated[str, Meta(pattern=r"^[^\x00]*$")]], Meta(min_length=1, max_length=1_000)]
    """The program and its arguments; there is no shell. Workers run programs that `--allow-command` names."""
    input: Literal["stdin", "file", "none"] = "stdin"
    """Where the program finds its input: as JSON on standard input, or in the file that `TASK_SPEC_PATH` names, with
    all that is known of the task. The file is there in any case."""
    output: Literal["json", "text", "last_line", "none"] = "json"
    """The form of standard output: one JSON document, text, lines of a log with JSON in the last, or nothing."""
    env: dict[str, str] = {}
    """Its environment, beside `PATH`, `HOME`, `LANG`, `TZ` and `TASK_…`; nothing else of the worker's is given on."""
    cwd: str | None = None
    """Where it runs; if nothing is said, in a folder of its own, which is removed afterwards."""
    retry_on: list[Annotated[int, Meta(ge=1, le=255)]] | None = None
    """Exit codes after which another try may succeed; if nothing is said, all of them."""
    grace: _Seconds = 10.0
    """Seconds between SIGTERM and SIGKILL when it is to end."""
    memory: _Size | None = None
    """Bytes of address space that each of its processes may have."""
    cpu: Annotated[int, Meta(ge=1)] | None = None
    """Seconds of CPU time that each of its processes may use."""
    files: _Size | None = None
    """Files that each of its processes may have open."""

    user: Annotated[str, Meta(pattern=whole(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"))] | None = None
    """The user that it runs as; its worker runs as root then. Default: the worker's own."""

    @property
    def wants(self) -> str:
        """The program: workers say which of them they may run."""
        return f"process {self.command[0]}"

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        program = self.command[0] if self.command else ""
        if not program or len(program) > 200 or "*" in program or ".." in program.split("/"):
            return [("command", "expected a program of 1 to 200 characters, without * and .., as its first word.")]
        if unnamed := [name for name in self.env if not name or "=" in name]:
            return [("env", f"{unnamed[0]!r} cannot be the name of a variable here.")]
        if loading := [name for name in self.env if name.startswith(("LD_", "DYLD_"))]:
            return [("env", f"{loading[0]} would have the program run something else, and is not given on.")]
        if self.cwd is not None and not self.cwd.startswith("/"):
            return [("cwd", f"expected a path from the root, such as /srv/jobs, found {self.cwd!r}.")]
        return []


# -- options of tasks for programs that poll for work: behind a firewall, in any language

LARGEST_BODY = 64_000_000
"""Most bytes of JSON that a program gets, where the input stands in the payload store."""


class Pull(ExecutorOptions, frozen=True, kw_only=True):
    """Work that is offered, and leased to a program that asks for it with `POST /queue/poll`."""

    executor: ClassVar[str] = "pull"

    service: str = ""
    """The service; default: the name of the task."""
    params: dict[str, Any] = {}
    """Given beside the input."""
    lease: float = 60.0
    """Seconds of silence after which the work is offered again; heartbeats begin them anew."""
    max_leases: int = 3
    """How many may have it and fall silent, one after another, before it fails."""

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say."""
        found = []
        if self.service and (problem := service_problem(self.service)):
            found.append(("service", problem))
        if not 1 <= self.lease <= 86_400:
            found.append(("lease", f"expected seconds, 1 to 86,400, found {self.lease:g}"))
        if not 1 <= self.max_leases <= 1_000:
            found.append(("max_leases", f"expected 1 to 1000, found {self.max_leases}"))
        return found


def service_of_pull(execution: Execution, options: Pull) -> str:
    """Return under which name it is offered."""
    return options.service or execution.task
