"""Whatever the input, a command succeeds or says in a line or two what is wrong, never with a traceback."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from orchestrator.cli import main
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.dag.definitions import loads
from orchestrator.settings import load_settings
from orchestrator.telemetry import Outage
from tests.fuzzing import examples

WORKFLOW = """
name: known
params: {day: {type: date, default: today}, count: {type: integer, default: 3}, any: {type: any, default: null}}
tasks: {only: {task: job}}
"""
RUN_FOR_EVER = {
    *("serve", "api", "dev", "scheduler", "worker", "runs watch"),
    *("bridge celery", "celery beat", "celery worker", "rq worker"),
}
WAIT_FOR_EVER = {"--wait", "--watch", "--follow"}


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        elif command is not None:
            yield " ".join((*path, name)), command


COMMANDS = {name: command for name, command in commands() if name not in RUN_FOR_EVER and name != "db upgrade"}

HOSTILE = [
    *("", " ", "-", "--", "=", "a=", "=b", "a=b=c", "0", "-1", "1e999", "NaN", "Infinity", "null", "true", "9" * 30),
    *("9" * 5_000, "-" + "9" * 5_000, "[" * 5_000, '{"a":' * 5_000, '"\\ud800"', '"\\u0000"', "\0", "a\0b", "\ud800"),
    *(
        "\udcff",
        "\x1b[31m",
        "\n",
        "\u202e",
        "ü" * 300,
        "%",
        "%s",
        "%(name)s",
        "'; DROP TABLE x; --",
        "{",
        "{0}",
        "${",
        "$${",
    ),
    *("known", "job", "00000000-0000-0000-0000-000000000000", "0-0", "18446744073709551615-18446744073709551615"),
    *("2024-01-31", "9999-12-31T23:59:59+14:00", "0001-01-01T00:00:00-14:00", "99999999999d", "1d1d", "-2h", "1e3d"),
    *("/", "/dev/null", ".", "..", "/etc/passwd", "a:b", "os:path", "json:loads", "..:x", ":", "success", "failed"),
    *(
        "day=2024-01-31",
        "day=yesterday",
        "count=x",
        "count=1e400",
        'any={"a": NaN}',
        "2147483648",
        "4294967296",
        "10001",
    ),
]
words = (
    st.sampled_from(HOSTILE)
    | st.text(max_size=20)
    | st.binary(max_size=8).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Draw a command line with known options and arbitrary arguments."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    line = name.split()
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Argument):
            line += draw(st.lists(words, max_size=3 if parameter.nargs == -1 else 1))
        elif not WAIT_FOR_EVER.isdisjoint(parameter.opts):
            continue
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            line += [parameter.opts[0]] if draw(st.booleans()) else []
        elif draw(st.integers(0, 3)) == 0:
            line += [parameter.opts[0], draw(words)]
    line += draw(st.lists(words, max_size=1)) if draw(st.integers(0, 9)) == 0 else []
    return line


@pytest.fixture(scope="module")
def services(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings of a system that has an object of each kind."""
    folder = tmp_path_factory.mktemp("services")
    app = Orchestrator(load_settings(folder, {}, database_url=database_url, redis_url=redis_url))
    job = app.task(name="job")(lambda number=0: number)
    job.enqueue(1)
    app.start_many(job, range(3))
    app.workflows.apply(loads(WORKFLOW))
    app.workflows["known"].start()
    app.close()
    with Redis.from_url(redis_url) as redis:
        redis.xadd("{orchestrator:0}:quarantine", {"entry": b"\xff", "size": b"x", "other": b"\0"})
        redis.xadd(
            "{orchestrator:0}:quarantine",
            {"entry": "5-0", "size": b"3", "error": b"\xff\x1b[0m", "body": b"\xc1\0\xff"},
        )
    return {"ORCHESTRATOR_DATABASE_URL": database_url, "ORCHESTRATOR_REDIS_URL": redis_url}


def check(result: Result, line: Any) -> None:
    """Check exit status and error message, and that there is no traceback."""
    assert result.exception is None or isinstance(result.exception, SystemExit), (line, repr(result.exception))
    of_a_container = (75, 78) if isinstance(line, list) and "run-task" in line else ()
    assert result.exit_code in (0, 1, 2, *of_a_container), (line, result.exit_code)
    assert "Traceback" not in result.output, line
    if result.exit_code == 2:
        assert "Error: " in result.stderr, line
    if result.exit_code == 1 and not (isinstance(line, list) and "--quiet" in line):
        assert result.stderr.strip(), line
    assert len(result.stderr) < 60_000, line  # click repeats the rejected word


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@examples(120)
@given(command_lines())
def test_arbitrary_command_lines_cause_no_traceback(services: dict[str, str], elsewhere: Path, line: list[str]) -> None:
    check(CliRunner().invoke(main, line, env=services, input="n\n"), line)


@pytest.mark.parametrize("where", ["..:x", ".", ".tasks:app", ":app"])
def test_a_relative_application_path_is_rejected(services: dict[str, str], elsewhere: Path, where: str) -> None:
    result = CliRunner().invoke(main, ["schedules", "apply", "--app", where], env=services)
    check(result, where)
    assert result.exit_code == 1
    assert f"An application is given as module:app, e.g. tasks:app; found {where!r}." in result.stderr


@examples(50)
@given(st.lists(words, max_size=4))
def test_arbitrary_words_cause_no_traceback(services: dict[str, str], elsewhere: Path, line: list[str]) -> None:
    if line and line[0] not in RUN_FOR_EVER:
        check(CliRunner().invoke(main, line, env=services, input=""), line)


@examples(50)
@given(st.text(max_size=100) | st.binary(max_size=100), st.sampled_from(["validate", "apply", "diff"]))
def test_arbitrary_workflow_files_cause_no_traceback(
    services: dict[str, str], elsewhere: Path, content: str | bytes, verb: str
) -> None:
    file = elsewhere / "file.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    check(CliRunner().invoke(main, ["workflows", verb, str(file)], env=services), content)


URLS = [
    *("redis://", "redis://:x@", "redis://h:port/0", "redis://h:99999/0", "redis://[::1", "redis://127.0.0.1:1/zero"),
    *(
        "redis://127.0.0.1:1/0?nonsense=1",
        "redis://127.0.0.1:1/0?socket_timeout=x",
        "unix://",
        "unix:///nowhere",
        "rediss://",
    ),
    *("redis://127.0.0.1:1/-1", "redis:nothing", "redis", "http://x", "redis://127.0.0.1:1/0?protocol=9"),
]
DATABASES = [
    *("postgresql://", "postgresql://h:port/x", "postgresql://127.0.0.1:99999/x", "postgresql://[::1", "postgres"),
    *("postgresql+nothing://h/x", "postgresql://127.0.0.1:1/x?nonsense=1", "postgresql+asyncpg://h/x", "mysql://h/x"),
    *(
        "postgresql://127.0.0.1:1/x?connect_timeout=soon",
        "postgresql://127.0.0.1:1/%ff",
    ),
]


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send SIGTERM to a process as soon as it has reported an outage of a server."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    failed = Outage.failed

    def failed_and_told_to_stop(outage: Outage, reason: str) -> None:
        failed(outage, reason)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Outage, "failed", failed_and_told_to_stop)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("line", ["worker --app os:path", "scheduler"])
@pytest.mark.parametrize("url", URLS)
def test_unusable_redis_urls_are_reported_at_startup(
    services: dict[str, str], elsewhere: Path, url: str, line: str
) -> None:
    result = CliRunner().invoke(main, line.split(), env=services | {"ORCHESTRATOR_REDIS_URL": url})
    check(result, url)
    assert "edis" in result.stderr
    assert result.exit_code == (0 if "Redis cannot be used; waiting for it" in result.stderr else 1)


@pytest.mark.parametrize("line", ["status", "quarantine list"])
@pytest.mark.parametrize("url", URLS)
def test_commands_report_unusable_redis_urls(services: dict[str, str], elsewhere: Path, url: str, line: str) -> None:
    environment = services | {"ORCHESTRATOR_REDIS_URL": url}
    result = CliRunner().invoke(main, line.split(), env=environment)
    check(result, url)
    if line != "status":
        assert result.exit_code == 1
        assert "edis" in result.stderr


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("url", DATABASES)
def test_unusable_database_urls_are_reported_at_startup(services: dict[str, str], elsewhere: Path, url: str) -> None:
    result = CliRunner().invoke(main, ["scheduler"], env=services | {"ORCHESTRATOR_DATABASE_URL": url})
    check(result, url)
    assert "database_url" in result.stderr or "Postgres" in result.stderr
    assert result.exit_code == (0 if "Postgres cannot be used; waiting for it" in result.stderr else 1)


@pytest.mark.parametrize("line", ["enqueue job", "db upgrade"])
@pytest.mark.parametrize("url", DATABASES)
def test_commands_report_unusable_database_urls(services: dict[str, str], elsewhere: Path, url: str, line: str) -> None:
    result = CliRunner().invoke(main, line.split(), env=services | {"ORCHESTRATOR_DATABASE_URL": url})
    check(result, url)
    assert result.exit_code == 1
    assert "database_url" in result.stderr or "Postgres" in result.stderr


@pytest.mark.parametrize("name", ["lease", "batch", "max_payload"])
def test_invalid_settings_are_reported(services: dict[str, str], elsewhere: Path, name: str) -> None:
    for value in ("x", "-1", "0", "nan", "inf", "1e300", "9" * 5_000, "0x10", "1_000_000_000_000"):
        result = CliRunner().invoke(main, ["status"], env=services | {f"ORCHESTRATOR_{name.upper()}": value})
        check(result, value)
        assert result.exit_code == 1
        assert f"Setting {name}" in result.stderr


# -- output


def test_the_quarantine_is_shown_and_cleared(services: dict[str, str], elsewhere: Path) -> None:
    def run(*line: str) -> Result:
        return CliRunner().invoke(main, line, env=services)

    with Redis.from_url(services["ORCHESTRATOR_REDIS_URL"]) as redis:
        redis.delete("{orchestrator:0}:quarantine")
        assert run("quarantine", "list").output == "The quarantine is empty.\n"
        fields = {"entry": "default/5-0", "body": b"\x93\x01\x02\xa1x", "size": 4, "error": "Dispatch expected"}
        redis.xadd("{orchestrator:0}:quarantine", fields, id="1731600000000-0")
        redis.xadd("{orchestrator:0}:quarantine", fields | {"body": b"\xc1", "size": 50_000}, id="1731600000000-1")
        redis.xadd("{orchestrator:0}:quarantine", {"strange": b"\xff"}, id="1731600000001-0")
        listed = json.loads(run("quarantine", "list", "--json").stdout)["messages"]
        assert [message["id"] for message in listed] == ["1731600000001-0", "1731600000000-1", "1731600000000-0"]
        assert listed[2]["source"] == "default/5-0"
        assert listed[2]["body"] == "kwECoXg="
        shown = run("quarantine", "list").output
        assert "Dispatch expected" in shown
        assert '[1, 2, "x"]' in shown
        assert r"b'\xc1'" in shown
        assert '[1, 2, "x"]' in run("quarantine", "show", "1731600000000-0").output
        cut = run("quarantine", "show", "1731600000000-1").output
        assert "50,000, the first 1 kept" in cut
        assert r"b'\xc1'" in cut
        missing = run("quarantine", "show", "7-7")
        assert (missing.exit_code, "There is no message 7-7 in the quarantine" in missing.stderr) == (1, True)
        assert json.loads(run("status", "--json").stdout)["redis"]["quarantined"] == 3
        status = run("status").output
        assert "3 messages" in status
        assert "orchestrator quarantine list" in status
        assert run("quarantine", "clear").exit_code == 1
        assert run("quarantine", "clear", "--yes").output == "Dropped 3 messages.\n"
        assert json.loads(run("status", "--json").stdout)["redis"]["quarantined"] == 0


def test_status_reports_foreign_keys_and_an_unreachable_redis(services: dict[str, str], elsewhere: Path) -> None:
    with Redis.from_url(services["ORCHESTRATOR_REDIS_URL"]) as redis:
        redis.delete("{orchestrator:0}:workers")
        redis.lpush("{orchestrator:0}:workers", "mine")
        output = CliRunner().invoke(main, ["status"], env=services).output
        assert "Redis key {orchestrator:0}:workers holds a list instead of our set" in output
        document = json.loads(CliRunner().invoke(main, ["status", "--json"], env=services).stdout)
        redis.delete("{orchestrator:0}:workers")
    assert document["redis"]["foreign_keys"] == [
        {"key": "{orchestrator:0}:workers", "expected": "set", "found": "list"}
    ]
    away = services | {"ORCHESTRATOR_REDIS_URL": "redis://127.0.0.1:1/0"}
    result = CliRunner().invoke(main, ["status"], env=away)
    assert result.exit_code == 0
    assert "! Redis cannot be reached (" in result.output
