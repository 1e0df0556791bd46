"""Lists of schedules have pages in the SDK, over HTTP and in the CLI; none reads all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, text

from orchestrator import Orchestrator, Settings
from orchestrator.cli import main
from orchestrator.cli.schedules import commands
from orchestrator.sdk import schedules as sdk_schedules
from orchestrator.settings import load_settings
from orchestrator.store.schedules import definitions
from tests.integration.api_client import ApiClient

KEYS = [f"{workflow}/{name}" for workflow in ("a", "a-b", "b/c") for name in ("default", "x", "y")]
KEYS.remove("b/c/y")
_PUT = text("""
INSERT INTO orchestrator.schedules (workflow, name, definition, next_fire, due_at)
VALUES (:workflow, :name, jsonb_build_object('every', 3600, 'name', CAST(:name AS text)), now() + interval '1 hour',
        now() + interval '1 hour')
""")


@pytest.fixture(autouse=True)
def stored(engine: Engine) -> list[str]:
    """Store eight schedules; return their keys in listing order."""
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE orchestrator.schedules, orchestrator.backfills, orchestrator.runs"))
        for key in KEYS:
            workflow, _, name = key.rpartition("/")
            connection.execute(_PUT, {"workflow": workflow, "name": name})
        ordered = text("SELECT workflow || '/' || name FROM orchestrator.schedules ORDER BY workflow, name")
        return list(connection.execute(ordered).scalars())


def test_the_sdk_pages_schedules(
    stored: list[str], database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Orchestrator(Settings(database_url=database_url, redis_url=redis_url)) as app:
        first = app.schedules.page(limit=3)
        assert ([one.key for one in first.schedules], first.next) == (stored[:3], stored[2])
        second = app.schedules.page(limit=5, after=first.next)
        assert ([one.key for one in second.schedules], second.next) == (stored[3:], stored[7])
        assert app.schedules.page(limit=5, after=second.next) == ([], None)
        monkeypatch.setattr(sdk_schedules, "_PAGE_SIZE", 3)
        read: list[int] = []
        page = definitions.page

        def record_page_size(*given: object, **options: object) -> definitions.SchedulePage:
            found = page(*given, **options)  # type: ignore[arg-type]
            read.append(len(found.schedules))
            return found

        monkeypatch.setattr(definitions, "page", record_page_size)
        keys = iter(app.schedules)
        assert [next(keys) for _ in range(3)] == stored[:3]
        assert read == [3], "it reads on when it is asked for more"
        assert list(keys) == stored[3:]
        assert len(app.schedules) == 8
        assert "a" in app.schedules
        assert "b/c/x" in app.schedules
        assert "c" not in app.schedules


def test_the_http_api_and_dashboard_page_schedules(stored: list[str], database_url: str, redis_url: str) -> None:
    server = ApiClient(load_settings(environ={}, database_url=database_url, redis_url=redis_url))
    found: list[str] = []
    query = "limit=3"
    while True:
        answer = server.send("GET", f"/api/v1/schedules?{query}").json()
        assert len(answer["schedules"]) <= 3
        found += [f"{one['workflow']}/{one['name']}" for one in answer["schedules"]]
        if answer["next"] is None:
            break
        query = f"limit=3&cursor={answer['next']}"
    assert found == stored
    shown = server.send("GET", "/ui/schedules?limit=3").text
    assert [key for key in stored if f'id="{key}"' in shown] == stored[:3]
    assert f'href="/ui/schedules?cursor={stored[2].replace("/", "%2F")}"' in shown
    assert 'rel="next"' not in server.send("GET", f"/ui/schedules?cursor={stored[2]}").text


def test_the_command_line_pages_schedules(
    stored: list[str], in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(main, ["schedules", "list", *words])
        assert result.exit_code == 0, result.output
        return result.output

    assert f"add --after {stored[2]}, or --all" in run("--limit", "3")
    answer = json.loads(run("--limit", "3", "--after", stored[2], "--json"))
    assert ([one["key"] for one in answer["schedules"]], answer["next"]) == (stored[3:6], stored[5])
    monkeypatch.setattr(commands, "_PAGE", 3)
    pages, decoder, rest = [], json.JSONDecoder(), run("--all", "--json").strip()
    while rest:
        page, end = decoder.raw_decode(rest)
        pages.append([one["key"] for one in page["schedules"]])
        rest = rest[end:].strip()
    assert pages == [stored[:3], stored[3:6], stored[6:]], "page by page, not all at once"
    assert run("--all").count("every 1h") == 8
