"""Closing coroutines and asynchronous generators that will never be resumed."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

logger = logging.getLogger("orchestrator.workflow")
_MOST_TRIES = 100
_stubborn: list[Any] = []
"""What cannot be closed is kept for ever: collecting it would run its code inside somebody else's."""


class Closable(Protocol):
    """A coroutine, or what stands for one."""

    def close(self) -> None:
        """Raise GeneratorExit where it waits; RuntimeError says that it waits again."""


def put_away(coroutines: Iterable[Closable], generators: Iterable[AsyncGenerator[Any, Any]]) -> None:
    """Close all of these, however often their `finally` blocks wait for something."""
    for one in [*coroutines, *map(_Generator, generators)]:
        for _ in range(_MOST_TRIES):
            try:
                one.close()
                break
            except RuntimeError:
                continue  # it waits again, further on; so close it there
            except BaseException:  # noqa: BLE001  # an error in a `finally` block concerns nobody any more
                break
        else:
            logger.warning("%r cannot be closed: it catches GeneratorExit in a loop.", one)
            _stubborn.append(one)


class _Generator:
    """Closes an asynchronous generator, step by step, without an event loop."""

    def __init__(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generator = generator
        self._closing: Any = None

    def close(self) -> None:
        try:
            if self._closing is None:
                self._closing = self._generator.aclose()
                self._closing.send(None)
            else:
                self._closing.throw(GeneratorExit())
        except (StopIteration, StopAsyncIteration, GeneratorExit):
            return
        raise RuntimeError("it waits again")
