"""How the code of a workflow ends its run to go on in a new one."""

from __future__ import annotations


class ContinueAsNew(BaseException):
    """Ends the run, to go on in a new one. Not an Exception, so that no `except Exception` stops it."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the workflow continues as a new run")
        self.payload = payload


def continuation(error: BaseException) -> ContinueAsNew | None:
    """Return how a run goes on whose code has raised this: also where a group of tasks has, and nothing else in it."""
    if isinstance(error, ContinueAsNew):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    ways = [continuation(one) for one in error.exceptions]
    return None if None in ways else ways[0]
