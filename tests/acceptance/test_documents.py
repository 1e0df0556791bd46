"""The code in the README and the guides runs as written."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis import Redis

from orchestrator.cli import main
from orchestrator.store.database import engine_for
from tests.acceptance import pages
from tests.acceptance.pages import PAGES, REPOSITORY
from tests.emptying import empty

pytestmark = pytest.mark.timeout(600)  # the environment of the pages is installed once


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    """Install the packages that a reader has."""
    pages.install()


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that the user of Postgres can reach, whatever pytest does to its temporary folders."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-docs-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def served_folder(folder: Path, database_url: str, redis_url: str) -> Path:
    """A folder with servers for `orchestrator dev`, which saves the seconds to start its own."""
    with closing(Redis.from_url(redis_url)) as redis:
        redis.flushall()
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection)
    engine.dispose()
    urls = f'database_url = "{database_url}"\nredis_url = "{redis_url}"\n'
    (folder / "pyproject.toml").write_text(f"[tool.orchestrator]\n{urls}", encoding="utf-8")
    return folder


def test_the_readme_runs_as_printed(folder: Path) -> None:
    """With the servers that `orchestrator dev` starts."""
    assert pages.run_page(REPOSITORY / "README.md", folder)


@pytest.mark.parametrize(
    "page",
    [
        "tasks",
        "composition",
        "limits",
        "exactly-once",
        "workflows",
        "flows",
        "code-workflows",
        "schedules",
        "from-celery",
    ],
)
def test_a_page_runs_as_printed(page: str, served_folder: Path) -> None:
    assert pages.run_page(REPOSITORY / "docs" / f"{page}.md", served_folder)


def test_every_program_that_a_page_shows_is_run_there() -> None:
    for page in PAGES:
        typed = " ".join(command.line for command in pages.commands(page))
        for name, body in pages.files_in(page).items():
            is_program = re.search(r"^(?:print|asyncio\.run)\(", body, re.MULTILINE)
            assert not is_program or f"python {name}" in typed, f"{page.name}: {name} is never run"


def test_the_tests_of_code_workflows_run_as_written(folder: Path) -> None:
    for name, body in pages.files_in(REPOSITORY / "docs" / "code-workflows.md").items():
        pages.write(folder, name, body)
    assert "6 passed" in pages.run(folder, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")


def test_every_command_of_the_readme_exists() -> None:
    for command in pages.commands(REPOSITORY / "README.md"):
        words = command.line.split()
        if words[0].startswith("./"):
            assert os.access(REPOSITORY / words[0], os.X_OK), words[0]
        elif words[0] == "orchestrator":
            assert CliRunner().invoke(main, [words[1], "--help"]).exit_code == 0, words[1]
