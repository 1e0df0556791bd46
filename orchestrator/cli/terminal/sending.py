"""An application for commands that ask for something and need none of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TypeVar

from orchestrator.cli.terminal.output import echo
from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import load_settings

T = TypeVar("T")


def sending() -> closing[Orchestrator]:
    """Return an application without tasks, for a `with` block that closes its connections."""
    return closing(Orchestrator(load_settings()))


def ask_each(things: Iterable[T], ask: Callable[[Orchestrator, T], object], said: str) -> None:
    """Ask for the same about several things, and say so of each."""
    with sending() as app:
        for thing in things:
            ask(app, thing)
            echo(said.format(thing))
