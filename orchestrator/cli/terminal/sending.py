"""An application for commands that ask for something and need none of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from orchestrator.cli.terminal.output import echo
from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import load_settings

T = TypeVar("T")


@contextmanager
def sending() -> Iterator[Orchestrator]:
    """Yield an application without tasks, and close its connections afterwards."""
    app = Orchestrator(load_settings())
    try:
        yield app
    finally:
        app.close()


def ask_each(things: Iterable[T], ask: Callable[[Orchestrator, T], object], said: str) -> None:
    """Ask for the same about several things, and say so of each."""
    with sending() as app:
        for thing in things:
            ask(app, thing)
            echo(said.format(thing))
