"""The program of a Ray job: it calls a function, and writes the result as the last line of the job's log.

It is sent as text to machines where this package is not installed, and uses only the standard library.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from typing import Any


def main() -> int:
    """Call the function named in the arguments, with the input from the environment. Return the exit code."""
    specification = json.loads(os.environ["TASK_SPEC"])
    end = call(sys.argv[1], specification.get("arguments", []), specification.get("input", {}))
    ray = sys.modules.get("ray")
    if ray is not None and hasattr(ray, "shutdown"):
        ray.shutdown()  # otherwise output of the cluster's workers could mix with our line
    sys.stdout.flush()
    sys.stderr.flush()
    line = f"\norchestrator-end {os.environ['TASK_EXECUTION']} {json.dumps(end)}\n".encode()
    while line:
        line = line[os.write(1, line) :]
    return 0 if "output" in end else 1


def call(path: str, arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Call a function. Return its result or its error."""
    try:
        module, _, name = path.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        value = found(*arguments, **keywords)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    except BaseException as error:  # noqa: BLE001  # whatever ends the function is its end
        return {"kind": type(error).__name__, "message": str(error), "detail": traceback.format_exc()}
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"unreadable": str(error)}
    return {"output": value}


if __name__ == "__main__":
    sys.exit(main())
