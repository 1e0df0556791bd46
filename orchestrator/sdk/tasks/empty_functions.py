"""Functions without a body, which declare a task that an executor or another program runs."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

_NO_EFFECT = frozenset(
    (
        "COPY_FREE_VARS",
        "NOP",
        "POP_TOP",
        "RESUME",
        "RETURN_GENERATOR",  # begins every `async def`
        "RETURN_VALUE",
        "CALL_INTRINSIC_1",  # ends an `async def`, to raise StopIteration
        "RERAISE",
    )
)
_CONSTANT = frozenset(("LOAD_CONST", "RETURN_CONST"))


def is_empty(function: Callable[..., Any]) -> bool:
    """Return whether the body of a function is `...`, `pass` or a docstring, or only returns None."""
    code = getattr(function, "__code__", None)
    return code is not None and all(
        step.opname in _NO_EFFECT or (step.opname in _CONSTANT and step.argval is None)
        for step in dis.get_instructions(code)
    )
