"""`orchestrator top` as a process in a real pseudoterminal, whose screen is read as a user would see it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine

from orchestrator.cli import main
from orchestrator.cli.top.live import run_lines, task_lines
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings
from orchestrator.store.insights.activity import recent_failures
from orchestrator.store.insights.failures import target_of
from tests import forking
from tests.integration.stage import System
from tests.waiting import eventually

_DRAWN = "\x1b[?2026h"
_MOVE = re.compile(r"\x1b\[(\d+);1H|\x1b\[2J|\x1b\[J")


class Terminal:
    """A terminal that runs a program, with the content of its screen."""

    def __init__(self, environment: dict[str, str], *arguments: str, width: int = 80, height: int = 24) -> None:
        self._ours, self._theirs = pty.openpty()
        self.before = termios.tcgetattr(self._theirs)
        self.resize(width, height)
        screen = {"stdin": self._theirs, "stdout": self._theirs, "stderr": self._theirs}
        self.process = forking.begin("top", *arguments, environment=environment, **screen)
        self.written = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65_536)
            except OSError:
                return
            self.written += data.decode("utf-8", "replace")

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def lines(self) -> list[str]:
        """Return the lines of the screen, according to the output so far."""
        rows: dict[int, str] = {}
        places = list(_MOVE.finditer(self.written))
        for place, after in zip_longest(places, places[1:]):
            if place[0] == "\x1b[2J":
                rows.clear()
            if place[1] is not None:
                text = self.written[place.end() : after.start() if after is not None else None]
                rows[int(place[1])] = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text).rstrip("\r\n")
        return [rows.get(row, "") for row in range(1, max(rows, default=0) + 1)]

    def shows(self, *words: str) -> bool:
        text = "\n".join(self.lines())
        return all(word in text for word in words)

    def await_words(self, *words: str) -> None:
        eventually(lambda: self.shows(*words), f"{words} on the screen")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._theirs)
        os.close(self._ours)

    @property
    def is_given_back(self) -> bool:
        """Return whether the terminal has its former attributes, main screen and cursor."""
        closed = self.written.rfind("\x1b[?1049l") > self.written.rfind("\x1b[?1049h")
        return termios.tcgetattr(self._theirs) == self.before and closed and "\x1b[?25h" in self.written[-60:]


@pytest.fixture
def environment(system: System) -> dict[str, str]:
    return {
        **os.environ,
        "TERM": "xterm-256color",
        "ORCHESTRATOR_DATABASE_URL": system.settings.database_url,
        "ORCHESTRATOR_REDIS_URL": system.settings.redis_url,
    }


@pytest.fixture
def busy(system: System) -> System:
    """A system with three running tasks, a failed one, and a queue without a worker."""
    worker = system.worker(slots=10)
    system.settle()
    system.dispatch(5)
    first, second, *rest = worker.take()
    worker.succeed(first)
    worker.fail(second, retryable=False)
    worker.start(*rest)
    system.job.options(queue="alone").enqueue()
    system.pass_seconds()
    return system


@contextmanager
def opened(environment: dict[str, str], *arguments: str, **size: int) -> Iterator[Terminal]:
    terminal = Terminal(environment, *arguments, **size)
    try:
        yield terminal
    finally:
        terminal.close()


def test_top_shows_current_work_and_follows_the_terminal_size(busy: System, environment: dict[str, str]) -> None:
    with opened(environment, "--interval", "0.2") as terminal:
        terminal.await_words("orchestrator top", "leader ", "default", "alone", "1 Running 3", "No worker serves alone")
        eventually(lambda: [len(line) for line in terminal.lines()] == [80] * 24, "the screen is full")
        terminal.type("3")
        terminal.await_words("job", ": ", "15 min")
        terminal.resize(120, 40)
        os.killpg(terminal.process.pid, signal.SIGWINCH)
        eventually(lambda: [len(line) for line in terminal.lines()] == [120] * 40, "it is drawn anew")
        terminal.type("?")
        terminal.await_words("pause or resume the queue")
        terminal.type("\x1b")
        terminal.await_words("sort: ready")
        terminal.type("q")
        assert terminal.process.wait(60) == 0
        eventually(lambda: terminal.is_given_back, "the terminal is given back")


def test_top_pauses_queues_and_cancels_tasks_after_confirmation(busy: System, environment: dict[str, str]) -> None:
    with opened(environment, "--interval", "0.2", "--filter", "alone") as terminal:
        terminal.await_words("alone", "filter: alone")
        terminal.type("p")
        terminal.await_words("Pause queue alone?")
        terminal.type("y")
        terminal.await_words("queue alone is paused")
        assert busy.sql("SELECT name FROM orchestrator.queues WHERE paused") == [{"name": "alone"}]
        terminal.type("\x1b")
        terminal.await_words("1 Running 3", "job")
        terminal.type("\tc")
        terminal.await_words("Cancel task job")
        terminal.type("y")
        terminal.await_words("asked to cancel task")
    busy.pass_seconds(2)
    assert busy.sql("SELECT count(*) AS n FROM orchestrator.ended_tasks WHERE status = 'cancelled'")[0]["n"] == 1


@pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM", "SIGHUP"])
def test_the_terminal_is_restored_however_top_ends(busy: System, environment: dict[str, str], how: str) -> None:
    with opened(environment) as terminal:
        terminal.await_words("orchestrator top", "default")
        if how == "ctrl-c":
            terminal.type("\x03")
        else:
            terminal.process.send_signal(signal.Signals[how])
        assert terminal.process.wait(60) == (0 if how == "ctrl-c" else 128 + signal.Signals[how])
        eventually(lambda: terminal.is_given_back, "the terminal is given back")
        assert "Traceback" not in terminal.written


def test_small_changes_write_little_to_the_terminal(busy: System, environment: dict[str, str]) -> None:
    with opened(environment, "--interval", "0.2") as terminal:
        terminal.await_words("orchestrator top", "default")
        before = len(terminal.written)
        written = eventually(lambda: drawn_often(terminal.written[before:]), "it was drawn ten times")
        assert len(written) / written.count(_DRAWN) < 1_500  # a full screen takes about 4,000 characters
        assert "\x1b[2J" not in written


def drawn_often(written: str) -> str:
    return written if written.count(_DRAWN) > 10 else ""


def test_top_prints_one_report_or_json_for_scripts(busy: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", busy.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", busy.settings.redis_url)
    shown = CliRunner().invoke(main, ["top", "--once"])
    assert shown.exit_code == 0, shown.output
    assert "No worker serves alone" in shown.output
    assert "\x1b" not in shown.output
    busy.pass_seconds()  # a worker that was silent for long would not be counted
    document = json.loads(CliRunner().invoke(main, ["top", "--json"]).output)
    assert {queue["queue"]: queue["ready"] for queue in document["queues"]} == {"default": 0, "alone": 1}
    assert [task["status"] for task in document["running"]] == ["running"] * 3
    assert document["failures"][0]["name"] == "job"
    assert document["load"]["live_workers"] == 1


def test_an_error_at_the_start_is_printed_without_a_screen(environment: dict[str, str]) -> None:
    environment = environment | {"ORCHESTRATOR_DATABASE_URL": "postgresql://127.0.0.1:1/nowhere"}
    with opened(environment) as terminal:
        assert terminal.process.wait(60) == 1
        eventually(lambda: "Error: " in terminal.written, "it says so")
        assert "\x1b[?1049h" not in terminal.written


def test_secrets_of_an_opened_task_or_run_are_redacted(
    busy: System, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_REDACT", "password")
    login = busy.app.task(name="login", redact=("token",))(lambda token, password="": (token, password))
    task = login.enqueue("very-secret", password="most-secret")
    busy.app.workflows.apply(loads("name: enter\nparams: {password: {}}\ntasks: {only: {task: job}}"))
    run = busy.app.workflows["enter"].start(password="most-secret")
    shown = "\n".join((*task_lines(busy.settings, task.id), *run_lines(busy.settings, run.id)))
    assert "login(" in shown
    assert "•••" in shown
    assert "-secret" not in shown


def test_acknowledged_failures_are_marked_and_snoozed_ones_hidden(busy: System, engine: Engine) -> None:
    def shown() -> list[str]:
        with engine.connect() as connection:
            return [group.state for group in recent_failures(connection)]

    assert shown() == [""]
    with engine.connect() as connection:
        (group,) = recent_failures(connection)
    line = "INSERT INTO orchestrator.audit (who, origin, act, kind, target, detail)"
    target = target_of((group.name, group.queue, group.id))
    busy.sql(f"{line} VALUES ('a', 'b', 'acknowledge', 'failures', :target, '{{}}')", target=target)
    assert shown() == ["acknowledged"]
    busy.sql("UPDATE orchestrator.audit SET at = at - interval '1 hour' WHERE kind = 'failures'")
    assert shown() == [""], "it has failed since"
    until = """'{"until": "2999-01-01T00:00:00Z"}'""".replace(":", "\\:")
    busy.sql(f"{line} VALUES ('a', 'b', 'snooze', 'failures', :target, {until})", target=target)
    assert shown() == []


def test_an_encrypted_error_message_is_decrypted(busy: System, engine: Engine) -> None:
    vault = vault_of(Settings(data_keys=f"top:{base64.b64encode(bytes(32)).decode()}"))
    assert vault is not None
    message = "the bank has refused " + 20 * "and refused "
    error = json.dumps({"kind": "Refused", "message": vault.seal_text(message)})
    busy.sql("UPDATE orchestrator.ended_tasks SET error = CAST(:error AS jsonb) WHERE status = 'failed'", error=error)
    with engine.connect() as connection:
        (failure,) = recent_failures(connection)
    assert failure.message == message
