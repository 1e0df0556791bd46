"""Whether an application can be found, asked before anything is started for it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from orchestrator.errors import ConfigurationError
from orchestrator.sdk.modules import ImportFailed
from orchestrator.workers.functions.loading import load_app


def what_is_wrong(where: str, *, mendable: bool) -> str | None:
    """Load an application in a process of its own, and return why that cannot be done; None if it can.

    Nothing of it stays here, and its output is left to the processes that load it next. With `mendable`, a module that
    raises is left to them, too: a change of a file may help.
    """
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reads)
            _be_quiet()
            os.write(writes, _refusal(where, mendable).encode(errors="replace")[:60_000])  # a pipe holds 64 kB
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8", errors="replace") as answer:
        said = answer.read()
    os.waitpid(process, 0)
    return said or None


def _be_quiet() -> None:
    """Print nowhere, and end where the user wants an end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)


def _refusal(where: str, mendable: bool) -> str:
    with suppress(Exception, SystemExit):  # the processes that load it next report all other errors
        try:
            load_app(where)
        except ConfigurationError as error:
            return "" if mendable and isinstance(error, ImportFailed) else str(error)
    return ""
