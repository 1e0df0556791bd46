"""Refuse calls that replay cannot repeat inside a workflow, and name the replacement.

While a workflow's code runs, and only then, the interpreter calls `watch`, a profile function, for every call in this
thread. Nothing is patched therefore, `from time import time` is detected as well as `time.time`, and other threads pay
nothing. A call counts if it comes from the project's own code: the packages with workflows, and any file that belongs
neither to Python nor to an installed package.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import inspect
import os
import pathlib
import random
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from asyncio import as_completed
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from orchestrator.errors import NotDeterministic
from orchestrator.sdk.code.commander import current

_CLOCK = "ctx.now()"
_SLEEP = "`await ctx.sleep(…)` or `await asyncio.sleep(…)`"
_RANDOM = "ctx.random, which has the same methods"
_UUID = "ctx.uuid()"
_OUTSIDE = "an argument of the workflow, or ctx.run(name, function), which records its result"
_TASK = "a task, or ctx.run(name, function) for something short"
_THREADS = "asyncio.create_task(…), or a task"

_MODULES: list[tuple[Any, str, str, str]] = [
    (time, "time", _CLOCK, "time time_ns localtime gmtime ctime monotonic monotonic_ns perf_counter perf_counter_ns"),
    (time, "time", _CLOCK, "process_time process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns"),
    (time, "time", "ctx.now().strftime(…)", "strftime asctime"),
    (time, "time", _SLEEP, "sleep"),
    (datetime.datetime, "datetime", _CLOCK, "now utcnow today"),
    (datetime.date, "date", "ctx.now().date()", "today"),
    (datetime.date, "date", "datetime.fromtimestamp(…, UTC).date()", "fromtimestamp"),
    (random, "random", _RANDOM, " ".join(name for name in random.__all__ if name[0].islower())),
    (secrets, "secrets", _RANDOM, "token_bytes token_hex token_urlsafe choice randbelow randbits"),
    (uuid, "uuid", _UUID, "uuid1 uuid4"),
    (os, "os", "ctx.random.randbytes(…)", "urandom"),
    (os, "os", _TASK, "system popen listdir scandir stat lstat remove open read write mkdir makedirs walk access"),
    (os, "os", _TASK, "rename replace rmdir unlink fork kill"),
    (os, "os", _OUTSIDE, "getenv getpid getppid getcwd uname cpu_count"),
    (os.environ, "os.environ", _OUTSIDE, "get __getitem__ __contains__ __iter__ keys values items copy"),
    (os.environ, "os.environ", _TASK, "__setitem__ __delitem__ pop update setdefault"),
    (os.path, "os.path", _TASK, "exists lexists isfile isdir islink getsize getmtime getctime getatime"),
    (shutil, "shutil", _TASK, "copy copyfile copytree move rmtree which disk_usage"),
    (socket, "socket", _OUTSIDE, "gethostname getfqdn"),
    (tempfile, "tempfile", _TASK, "mkstemp mkdtemp NamedTemporaryFile TemporaryFile"),
    (builtins, "builtins", _TASK, "open"),
    (builtins, "builtins", "a signal or a promise", "input"),
    (pathlib.Path, "Path", _TASK, "open read_text read_bytes write_text write_bytes exists mkdir unlink"),
    (pathlib.Path, "Path", _TASK, "stat is_file is_dir iterdir rename replace rmdir touch"),
    (threading.Thread, "Thread", _THREADS, "start"),
    (socket, "socket", _TASK, "create_connection getaddrinfo"),
    (socket.socket, "socket", _TASK, "__init__"),
    (subprocess, "subprocess", _TASK, "run call check_call check_output"),
    (subprocess.Popen, "Popen", _TASK, "__init__"),
]


_CALL = dis.opmap["CALL"]


@dataclass(frozen=True)
class _Watched:
    """A function that a workflow may not call."""

    name: str
    instead: str
    applies: Callable[[FrameType], bool] = lambda _: True
    """Whether the refusal applies to this call, given the frame of the called function."""


def _watched() -> dict[Any, list[_Watched]]:
    """Return the watched functions, by what the interpreter reports: a built-in function or a code object."""
    watched: dict[Any, list[_Watched]] = defaultdict(list)
    for module, module_name, instead, names in _MODULES:
        for name in names.split():
            function = getattr(module, name)
            full_name = f"{module_name}.{name}".removesuffix(".__init__").removeprefix("builtins.")
            if inspect.ismethod(function):  # a method of one object (`random.choice`): other objects may be used
                watched[function.__code__].append(_Watched(full_name, instead, partial(_is_of, function.__self__)))
            else:
                watched[getattr(function, "__code__", function)].append(_Watched(full_name, instead))
    watched[random.Random.__init__.__code__].append(
        _Watched("random.Random", "ctx.random, or give it a seed", _no_seed)
    )
    local = _Watched(
        "datetime.fromtimestamp", "datetime.fromtimestamp(…, UTC): without a zone it is local", _one_argument
    )
    watched[datetime.datetime.fromtimestamp].append(local)
    instead = "it as `asyncio.as_completed`, which keeps the order inside a workflow"
    watched[as_completed.__code__].append(_Watched("as_completed", instead, _unordered))
    return dict(watched)


def _is_of(owner: object, frame: FrameType) -> bool:
    return frame.f_locals.get("self") is owner


def _unordered(frame: FrameType) -> bool:
    futures = frame.f_locals.get("fs")
    return isinstance(futures, (list, tuple, set)) and any(map(inspect.iscoroutine, futures))


def _one_argument(frame: FrameType) -> bool:
    """Return whether a C function is called with one argument. `frame` is the caller's, at the call instruction."""
    code = frame.f_code.co_code
    return code[frame.f_lasti] == _CALL and code[frame.f_lasti + 1] == 1


def _no_seed(frame: FrameType) -> bool:
    return frame.f_locals.get("x") is None


_WATCHED = _watched()
_exempt: ContextVar[bool] = ContextVar("orchestrator_unguarded", default=False)


def watch(frame: FrameType, event: str, argument: Any) -> None:
    """Check one call. An exception raised here is raised in the calling code."""
    if event == "c_call":
        watched = _WATCHED.get(argument)
        caller: FrameType | None = frame
    elif event == "call":
        watched = _WATCHED.get(frame.f_code)
        caller = frame.f_back
    else:
        return
    if watched is None or caller is None or not is_own_code(caller) or _exempt.get():
        return
    for watched_function in watched:
        if watched_function.applies(frame):
            _refuse(watched_function, caller)


def _refuse(watched: _Watched, caller: FrameType) -> NoReturn:
    error = NotDeterministic(
        f"{watched.name}() could not be repeated on replay, so a workflow may not call it "
        f"({Path(caller.f_code.co_filename).name}, line {caller.f_lineno}). Instead, use {watched.instead}. If nothing "
        f"that the workflow does depends on it, put it inside `with unguarded():`."
    )
    commander = current()
    if commander is not None:
        commander.stop(error)  # even if the code catches it: it is no longer watched afterwards
    raise error


@contextmanager
def guarded() -> Iterator[None]:
    """Check the calls of this thread."""
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def unguarded() -> Iterator[None]:
    """Inside a workflow: allow any call in this block. The results must not affect what the workflow does."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


_own_packages: set[str] = set()
"""The project's own packages: those that contain workflows, wherever they are installed."""
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_INSTALLED = tuple(
    path + os.sep for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def watch_package_of(module: str) -> None:
    """Treat a module's top-level package as the project's own code."""
    _own_packages.add(module.partition(".")[0])


def is_own_code(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _own_packages:
        return True
    file = frame.f_code.co_filename
    if file.startswith("<"):  # generated code, such as the methods of a dataclass
        file = str(frame.f_globals.get("__file__", file))
    return _is_own_file(file)


@lru_cache(maxsize=4096)
def _is_own_file(file: str) -> bool:
    if file.startswith(("<frozen", _PACKAGE, *_INSTALLED)):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)
