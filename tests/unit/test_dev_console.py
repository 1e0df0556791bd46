"""All parts of `orchestrator dev` in one terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from orchestrator.cli.dev.children import Console, say
from orchestrator.telemetry import LOGGER_NAME, configure_logging


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_each_line_names_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("text")
    configure_logging("info", "text", into=console)
    say("dev", "one\ntwo\x1b[2J")
    console.pass_on("worker", "\x1b[31mred\x1b[0m \x1b[2Jcleared")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("dev       │ 2")
    assert first.endswith(" INFO    one")
    assert (second, third) == ("dev       │     two�[2J", "worker    │ red �[2Jcleared")


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_colors_follow_force_color_and_no_color(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_colour: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", no_colour)
    console = Console("text")
    configure_logging("info", "text", into=console)
    say("dev", "ready", logging.WARNING)
    line = capsys.readouterr().out
    assert ("\x1b[33mWARN \x1b[0m" in line) is not bool(no_colour)
    assert ("\x1b" in line) is not bool(no_colour)


def test_json_output_contains_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("json")
    configure_logging("info", "json", into=console)
    say("dev", "ready")
    console.pass_on("scheduler", '{"message": "leading", "logger": "orchestrator.scheduler"}')
    console.pass_on("worker", "printed while the application was imported")
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["logger"], line["message"]) for line in said] == [
        ("orchestrator.dev", "ready"),
        ("orchestrator.scheduler", "leading"),
        ("orchestrator.worker", "printed while the application was imported"),
    ]
