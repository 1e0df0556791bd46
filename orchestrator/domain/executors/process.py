"""The options of the executor `process`: a command that the operator of the workers allowed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.plain import whole

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
