"""Spans of calls that create tasks or runs."""

from __future__ import annotations

from contextlib import AbstractContextManager


class Sent:
    """A call that creates tasks or runs. This one has no span."""

    def created(self, identifier: bytes) -> None:
        """Say which task or run it is that is created."""


class Untraced(AbstractContextManager[Sent]):
    """What stands around such a call where there are no spans."""

    def __init__(self) -> None:
        self._sent = Sent()

    def __enter__(self) -> Sent:
        return self._sent

    def __exit__(self, *_: object) -> None:
        return None
