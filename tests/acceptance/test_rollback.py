"""Processes of this release on the schema of a newer release: after a rollback, or in the middle of a deploy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator.store import database
from orchestrator.store.tables.columns import SCHEMA
from tests import forking
from tests.acceptance.stack import Stack

MIGRATION = """
from alembic import op

revision, down_revision, oldest = "{revision}", "{before}", {oldest!r}


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.queues ADD COLUMN added_{revision} text")


def downgrade() -> None:
    op.execute("ALTER TABLE orchestrator.queues DROP COLUMN added_{revision}")
"""


class Newer:
    """A newer release, with its own migrations."""

    def __init__(self, stack: Stack, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stack = stack
        self._versions = folder / "migrations" / "versions"
        self._newest = database.REVISION
        shutil.copytree(database._MIGRATIONS, folder / "migrations")
        monkeypatch.setattr(database, "_MIGRATIONS", folder / "migrations")

    def migrate(self, monkeypatch: pytest.MonkeyPatch, *migrations: tuple[str, str | None]) -> None:
        """Apply migrations, each with the oldest revision that it supports."""
        monkeypatch.setattr(database, "REVISION", self._newest)
        for revision, oldest in migrations:
            script = MIGRATION.format(revision=revision, before=self._newest, oldest=oldest)
            (self._versions / f"r{revision}.py").write_text(script)
            self._newest = revision
        database.upgrade(self._stack.settings.database_url)

    def undo(self, monkeypatch: pytest.MonkeyPatch, revision: str) -> None:
        """Downgrade to an earlier revision of the newer release."""
        monkeypatch.setattr(database, "REVISION", self._newest)
        database.downgrade(self._stack.settings.database_url, revision)


def command(stack: Stack, *words: str) -> tuple[int, str]:
    done = forking.run(*words, environment=stack.environment)
    return done.returncode, done.stdout + done.stderr


def test_a_newer_schema_is_used_with_a_warning_or_rejected(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, release = database.REVISION, Newer(stack, tmp_path, monkeypatch)
    release.migrate(monkeypatch, ("9001", None), ("9002", known), ("9003", None))

    newer = f"The database is at revision 9003, newer than this release knows ({known}). It supports this release too."
    assert command(stack, "db", "upgrade") == (0, f"{newer} Nothing to do.\n")
    scheduler = stack.scheduler()
    assert scheduler.logged(newer)
    assert stack.leader() is scheduler
    scheduler.stop()

    release.migrate(monkeypatch, ("9004", "9004"), ("9005", None))

    for words in ("db upgrade", "scheduler"):
        code, said = command(stack, *words.split())
        assert (code, said.splitlines()[-1]) == (
            1,
            f"Error: The database is at revision 9005, newer than this release knows ({known}). It supports releases "
            f"of revision 9004 and later: use one of those, or restore a backup from before the upgrade.",
        )
        assert "Traceback" not in said
    assert stack.scalar(f"SELECT version_num FROM {SCHEMA}.alembic_version") == "9005"

    release.undo(monkeypatch, "9003")

    assert command(stack, "db", "upgrade") == (0, f"{newer} Nothing to do.\n"), "the mark went back, too"
