"""`orchestrator doctor`: each check, passing and failing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from click.testing import CliRunner
from redis import Redis
from sqlalchemy.engine import make_url

from orchestrator.cli import main
from orchestrator.cli.system import doctor
from orchestrator.store import compatibility, database
from orchestrator.store.insights import server

pytestmark = pytest.mark.own_connections  # tests create and drop roles

Checks = dict[str, dict[str, Any]]


@pytest.fixture
def examine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str, redis_url: str
) -> Callable[..., tuple[int, Checks]]:
    """Run `doctor` on both servers or on the given URLs; return its exit code and the checks by name."""
    monkeypatch.chdir(tmp_path)

    def run(**urls: str) -> tuple[int, Checks]:
        for name, url in ({"DATABASE": database_url, "REDIS": redis_url} | urls).items():
            monkeypatch.setenv(f"ORCHESTRATOR_{name}_URL", url)
        shown = CliRunner().invoke(main, ["doctor", "--json"])
        assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.output
        document = json.loads(shown.stdout)
        assert document["ok"] is (shown.exit_code == 0)
        return shown.exit_code, {found["check"]: found for found in document["checks"]}

    return run


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """A role with read-only access to our tables."""
    with _admin(database_url) as cursor:
        cursor.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
        cursor.execute("GRANT USAGE ON SCHEMA orchestrator TO reader")
        cursor.execute("GRANT SELECT ON ALL TABLES IN SCHEMA orchestrator TO reader")
        yield make_url(database_url).set(username="reader", password="reader").render_as_string(hide_password=False)
        cursor.execute("DROP OWNED BY reader")
        cursor.execute("DROP ROLE reader")


@contextmanager
def _admin(url: str) -> Iterator[Any]:
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        yield connection.cursor()


def test_all_checks_pass_except_for_missing_processes(examine: Callable[..., tuple[int, Checks]]) -> None:
    code, checks = examine()
    assert code == 0
    assert {name for name, found in checks.items() if found["level"] != "ok"} <= {
        *("durability", "workers", "no leader"),  # the test servers do not flush
        *("redis latency", "postgres latency", "postgres commit"),  # depends on the machine
    }
    assert checks.keys() >= {
        *("release", "settings", "disk", "redis", "redis permissions", "redis clock", "heartbeats", "postgres"),
        *("schema", "permissions", "pooler", "connections", "postgres clock", "workers", "no leader"),
    }
    assert checks["schema"]["found"] == f"revision {database.REVISION}, as this release needs it"


def test_a_missing_leader_fails_while_tasks_are_open(
    examine: Callable[..., tuple[int, Checks]], database_url: str
) -> None:
    with _admin(database_url) as cursor:
        cursor.execute(
            "INSERT INTO orchestrator.tasks (id, name, queue, payload) VALUES (gen_random_uuid(), 'late', 'doctor', '')"
        )
        try:
            code, checks = examine()
        finally:
            cursor.execute("DELETE FROM orchestrator.tasks WHERE queue = 'doctor'")
    assert (code, checks["no leader"]["level"]) == (1, "fail")
    assert (checks["workers"]["level"], checks["workers"]["found"]) == ("ok", "unknown while no scheduler leads")
    assert "no worker" not in checks


def test_text_output_has_one_line_for_each_check(examine: Callable[..., tuple[int, Checks]]) -> None:
    examine()
    lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    assert any(line.startswith("ok   schema ") for line in lines)


def test_without_a_database_only_redis_is_checked(examine: Callable[..., tuple[int, Checks]]) -> None:
    code, checks = examine(DATABASE="")
    assert code == 0
    assert {"redis", "redis latency"} < checks.keys()
    assert not checks.keys() & {"postgres", "schema", "scheduler", "workers"}


@pytest.mark.parametrize(
    ("urls", "check", "words"),
    [
        ({"DATABASE": "", "REDIS": ""}, "settings", "ORCHESTRATOR_REDIS_URL"),
        ({"REDIS": ""}, "settings", "redis_url is not"),
        ({"REDIS": "http://nowhere"}, "settings", "expected a URL that starts with redis://"),
        ({"REDIS": "redis://127.0.0.1:1/0"}, "redis away", "Connection refused"),
        ({"REDIS": "redis://127.0.0.1:1/0"}, "redis", "Connection refused"),
        ({"REDIS": "redis://127.0.0.1:1/0"}, "redis", "A URL with rediss:// is of a server with TLS"),
        ({"DATABASE": "", "REDIS": "redis://127.0.0.1:1/0"}, "redis away", "Connection refused"),
        ({"DATABASE": "postgresql://nobody@127.0.0.1:1/nothing"}, "postgres", "Connection refused"),
        ({"API": "http://127.0.0.1:1", "DATABASE": "", "REDIS": ""}, "system", "127.0.0.1:1"),
    ],
)
def test_missing_settings_and_servers_fail(
    examine: Callable[..., tuple[int, Checks]], urls: dict[str, str], check: str, words: str
) -> None:
    code, checks = examine(**urls)
    assert code == 1
    assert checks[check]["level"] == "fail"
    assert words in checks[check]["found"] + checks[check]["change"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("API_USER_SCOPE", "bogus"),
        ("API_USER_HEADER", "X-User"),
        ("API_PROXIES", "here"),
        ("API_GROUP_SCOPES", "ops=bogus"),
        ("API_QUOTAS", "rate=none"),
        ("METRICS", "unix://"),
        ("METRICS", "9" * 5_000),
        ("WEBHOOK_ALLOW", "a/b/c"),
        ("SERVICE_KEYS", "short"),
        ("SIGNING_KEYS", "short"),
        ("DATA_KEYS", "short"),
    ],
)
def test_a_setting_that_stops_another_process_fails(
    examine: Callable[..., tuple[int, Checks]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"ORCHESTRATOR_{name}", value)
    code, checks = examine()
    assert code == 1
    found = [check["found"] for check in checks.values() if check["level"] == "fail"]
    assert any(name.lower() in text or "quota" in text.lower() for text in found), found
    assert checks["settings"]["level"] == "fail" or name in ("SIGNING_KEYS", "DATA_KEYS")


def test_a_postgres_that_is_too_old_fails(
    examine: Callable[..., tuple[int, Checks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "OLDEST_POSTGRES", 99)
    code, checks = examine()
    assert code == 1
    assert checks["postgres"]["change"] == "Use Postgres 99 or newer."
    assert "schema" not in checks


def test_a_read_replica_that_is_a_primary_fails(
    examine: Callable[..., tuple[int, Checks]], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_READ_DATABASE_URL", database_url)
    code, checks = examine()
    assert code == 1
    assert checks["read replica"]["found"] == "it is a primary."


def test_a_database_without_tables_fails(
    examine: Callable[..., tuple[int, Checks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", "elsewhere")
    code, checks = examine()
    assert code == 1
    assert "orchestrator db upgrade" in checks["schema"]["found"]


def test_a_database_with_fewer_shards_than_the_setting_fails(
    examine: Callable[..., tuple[int, Checks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_SHARDS", "4")
    code, checks = examine()
    assert code == 1
    assert "has one shard, and setting shards is larger" in checks["schema"]["found"]
    assert checks["system"]["level"] == "fail"
    for command in (["status"], ["tasks", "list"], ["db", "check"]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 1
        assert re.match("Error: (The database has one shard|Setting shards is 4, and)", shown.stderr), shown.stderr


def test_a_role_without_rights_fails(examine: Callable[..., tuple[int, Checks]], role: str) -> None:
    code, checks = examine(DATABASE=role)
    assert code == 1
    assert "GRANT ALL ON ALL TABLES" in checks["permissions"]["change"]
    assert "tasks" in checks["permissions"]["found"]


def test_a_role_without_ownership_gets_a_warning(
    examine: Callable[..., tuple[int, Checks]], role: str, database_url: str
) -> None:
    with _admin(database_url) as cursor:
        cursor.execute("GRANT ALL ON ALL TABLES IN SCHEMA orchestrator TO reader")
    code, checks = examine(DATABASE=role)
    assert (code, checks["permissions"]["level"]) == (0, "warn")
    assert "postgres commit" in checks  # which needs no permission


def test_a_user_of_redis_without_rights_fails(examine: Callable[..., tuple[int, Checks]], redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.execute_command("ACL", "SETUSER", "default", "-publish", "-xadd")
        try:
            code, checks = examine(DATABASE="")
        finally:
            redis.execute_command("ACL", "SETUSER", "default", "+@all")
        assert code == 1
        assert "may not use XADD, PUBLISH." in checks["redis permissions"]["found"]
        assert examine(DATABASE="")[1]["redis permissions"]["level"] == "ok"


def test_a_redis_that_evicts_fails(examine: Callable[..., tuple[int, Checks]], redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.config_set("maxmemory", "512mb")
        redis.config_set("maxmemory-policy", "allkeys-lru")
        try:
            code, checks = examine(DATABASE="")
        finally:
            redis.config_set("maxmemory", "0")
            redis.config_set("maxmemory-policy", "noeviction")
    assert code == 1
    assert "CONFIG SET maxmemory-policy noeviction" in checks["redis evicts"]["found"]


def test_clock_skew_and_slow_commits_are_warnings(
    examine: Callable[..., tuple[int, Checks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = server.clock
    monkeypatch.setattr(server, "clock", lambda connection: told(connection) + 90.0)
    monkeypatch.setattr(doctor, "_SLOW_COMMIT", 0.0)
    code, checks = examine()
    assert code == 0
    assert checks["postgres clock"]["level"] == checks["postgres commit"]["level"] == "warn"
    assert checks["postgres clock"]["found"] == "1m 30s ahead of this machine."


def test_a_connection_pooler_gets_a_warning(
    examine: Callable[..., tuple[int, Checks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/acceptance/test_pgbouncer.py uses a real pooler."""
    monkeypatch.setattr(compatibility, "is_pooled", lambda _: True)
    assert examine()[1]["pooler"]["level"] == "warn"
