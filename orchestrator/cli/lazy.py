"""A group whose commands are loaded when they are called, and whose errors are messages, not tracebacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import click
from redis.exceptions import RedisError

from orchestrator.errors import OrchestratorError, did_you_mean
from orchestrator.harmless import harmless


class LazyGroup(click.Group):
    """Finds the command `name` as the attribute `command` of the module `package.name`."""

    def __init__(self, *args: Any, package: str, commands_help: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._package = package
        self._help = commands_help

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._help)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in self._help:
            return None
        found: click.Command = importlib.import_module(f"{self._package}.{name}").command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._help and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], self._help)}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse words that no command could store, look for or even print: bytes that are no UTF-8, and NUL."""
        for word in args:
            if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
                ctx.fail(f"{ascii(word)[:200]} is not text: it holds a NUL character, or bytes that are not UTF-8.")
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(self._help.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that was raised on purpose, or an outage, ends it with a message."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = harmless(error.message)  # type: ignore[misc]  # it quotes what was typed
            raise
        except OrchestratorError as error:
            raise click.ClickException(harmless(str(error))) from error
        except RedisError as error:
            raise click.ClickException(harmless(f"Redis cannot be used: {error}")) from error
        except _database_errors() as error:
            raise click.ClickException(harmless(f"Postgres cannot be used: {_store().explain(error)}")) from error


def _database_errors() -> Any:
    """Return what an outage of Postgres looks like; where the store is not loaded, there can be none."""
    return _store().UNAVAILABLE if _store() else ()


def _store() -> Any:
    return sys.modules.get("orchestrator.store.database")
