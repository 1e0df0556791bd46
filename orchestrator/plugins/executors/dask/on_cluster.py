"""Functions that run on the workers of a Dask cluster, where this package is not installed.

They are sent as code, and may use only what they import themselves. A call returns its end as data: exceptions would
have to be unpickled here, where their types may be unknown.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any


def _call(path: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, str]:
    """Call a function. Return its result as JSON or its error, and the last lines that it printed.

    A Dask worker runs several functions in threads: output is captured by thread, and also written as before.
    """
    import asyncio
    import importlib
    import inspect
    import json
    import sys
    import threading
    import traceback
    from collections import deque
    from types import ModuleType

    max_characters, max_lines = 200_000, 1_000
    thread = threading.get_ident()
    shared = sys.modules.setdefault("orchestrator_prints", ModuleType("orchestrator_prints"))
    by_thread = shared.__dict__.setdefault("by_thread", {})

    class Tail:
        def __init__(self) -> None:
            self.parts: deque[str] = deque()
            self.size = 0

        def add(self, text: str) -> None:
            self.parts.append(text[-max_characters:])
            self.size += len(self.parts[-1])
            while self.size > max_characters:
                self.size -= len(self.parts.popleft())

    class OrchestratorPrints:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, text: str) -> Any:
            if (tail := by_thread.get(threading.get_ident())) is not None:
                tail.add(text)
            return self.stream.write(text)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

    def ended() -> dict[str, str]:
        try:
            module, _, name = path.partition(":")
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            value = found(*arguments, **keywords)  # type: ignore[operator]
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except BaseException as error:  # noqa: BLE001  # also one that `_stop` has raised here
            return {"kind": type(error).__name__, "message": str(error), "detail": traceback.format_exc()}
        try:
            return {"output": json.dumps(value, allow_nan=False)}
        except (TypeError, ValueError, RecursionError) as error:
            return {"unreadable": str(error)}

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and type(stream).__name__ != "OrchestratorPrints":
            setattr(sys, name, OrchestratorPrints(stream))
    tail = by_thread[thread] = Tail()
    try:
        end = ended()
    finally:
        by_thread.pop(thread, None)
    lines = "".join(tail.parts).splitlines()[-max_lines:]
    return {**end, "lines": "\n".join(lines)} if lines else end


def _stop(key: str, dask_worker: Any) -> bool:
    """Raise SystemExit in the threads of a worker that run this key. Return whether there are any."""
    import ctypes

    with dask_worker.active_threads_lock:
        threads = [thread for thread, running in dask_worker.active_threads.items() if running == key]
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    return bool(threads)


def _detached(function: Any) -> Callable[..., Any]:
    """Return a copy of a function without a module, so that it is pickled with its code."""
    space = {"__builtins__": builtins, "__name__": "on_dask"}
    detached = FunctionType(function.__code__, space, function.__name__.lstrip("_"))
    detached.__module__ = "on_dask"
    return detached


CALL = _detached(_call)
STOP = _detached(_stop)
