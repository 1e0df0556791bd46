"""Users of the machine as whom commands run: those of others see nothing of the worker."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
from typing import NamedTuple

from orchestrator.errors import ConfigurationError


class Account(NamedTuple):
    """A user, and how a command becomes that user's."""

    uid: int
    gid: int
    home: str
    prefix: tuple[str, ...]
    """The words before the command."""


def account_of(user: str) -> Account:
    """Return a user of this machine; where commands cannot run as that one, the attempt fails.

    It is not handed back: a worker that hands a command back gets no more of its program, for any user.
    """
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        machine = socket.gethostname()
        raise ConfigurationError(f"Executor process: there is no user {user!r} on machine {machine}.") from None
    program = shutil.which("setpriv")
    if os.geteuid() != 0 or program is None:
        lack = "the program setpriv (package util-linux)" if os.geteuid() == 0 else "to run as root"
        raise ConfigurationError(f"Executor process: to run commands as user {user!r}, this worker needs {lack}.")
    options = (f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--init-groups", "--no-new-privs", "--")
    return Account(found.pw_uid, found.pw_gid, found.pw_dir, (program, *options))
