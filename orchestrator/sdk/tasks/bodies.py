"""Whether a function does anything: one that an executor stands for has a signature, and often nothing more."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

_NOTHING = frozenset(
    (
        "COPY_FREE_VARS",
        "NOP",
        "POP_TOP",
        "RESUME",
        "RETURN_GENERATOR",  # what every `async def` begins with
        "RETURN_VALUE",
        "CALL_INTRINSIC_1",  # and how it ends where it raises StopIteration
        "RERAISE",
    )
)
_CONSTANT = frozenset(("LOAD_CONST", "RETURN_CONST"))


def is_empty(function: Callable[..., Any]) -> bool:
    """Say whether the body of a function is `...`, `pass`, a docstring, or returns None and does nothing else."""
    code = getattr(function, "__code__", None)
    return code is not None and all(
        step.opname in _NOTHING or (step.opname in _CONSTANT and step.argval is None)
        for step in dis.get_instructions(code)
    )
