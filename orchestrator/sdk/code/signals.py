"""Signals: messages to a run, kept in order per name until the code takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from orchestrator.errors import PayloadError
from orchestrator.sdk.values.payload import decode_value

T = TypeVar("T")


class Mailbox:
    """The signals of one name, including those that the code has not asked for yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self.taken = 0
        self.deliver: Callable[[], None] | None = None
        """Passes the waiting signals to the handler, if there is one."""

    @property
    def is_awaited(self) -> bool:
        """Return whether the code waits for a signal of this name."""
        return any(not getter.done() for getter in self.waiting._getters)  # type: ignore[attr-defined]


class Signals(Generic[T]):
    """The signals of one name, in order of arrival: `await signals.get()`, or `async for value in signals`."""

    def __init__(self, mailbox: Mailbox, kind: Any) -> None:
        self._mailbox = mailbox
        self._kind = kind

    def __repr__(self) -> str:
        return f"<Signals {self._mailbox.name}: {len(self)} waiting>"

    def __len__(self) -> int:
        return self._mailbox.waiting.qsize()

    def __bool__(self) -> bool:
        return True  # an empty mailbox is not false

    async def get(self) -> T:
        """Return the next signal. Wait until there is one."""
        return self._take(await self._mailbox.waiting.get())

    def get_nowait(self) -> T:
        """Return the next signal, or raise asyncio.QueueEmpty."""
        return self._take(self._mailbox.waiting.get_nowait())

    def __aiter__(self) -> Signals[T]:
        return self

    async def __anext__(self) -> T:
        return await self.get()

    def _take(self, data: bytes) -> T:
        self._mailbox.taken += 1
        try:
            value: T = decode_value(data, self._kind)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise PayloadError(f"Signal {self._mailbox.name!r} does not match its type: {error}.") from None
        return value
