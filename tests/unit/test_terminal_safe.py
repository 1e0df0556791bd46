"""Text from other sources is shown, but cannot control the terminal."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import InvalidTask, InvalidWorkflow, Orchestrator
from orchestrator.telemetry import LOGGER_NAME, configure_logging, get_logger
from orchestrator.terminal_safe import indented, one_line, terminal_safe, terminal_safe_json, with_styles

EVIL = "a\x1b[2J\x9b\r\x00\x7f\u202e\u2066\u2028\ud800\U000e0041b"


@given(st.text())
@pytest.mark.slow
def test_safe_text_keeps_its_length_and_all_harmless_characters(text: str) -> None:
    shown = terminal_safe(text)
    assert len(shown) == len(one_line(text)) == len(text)
    assert all(new == old or new == "�" for new, old in zip(shown, text, strict=True))
    assert not set("\x1b\r\x08\x9b\u202e") & set(shown)
    assert len(one_line(text).splitlines()) <= 1
    assert terminal_safe(shown) == shown


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
@pytest.mark.slow
def test_safe_json_decodes_to_the_same_value(value: object) -> None:
    document = json.dumps(value, ensure_ascii=False)
    safe = terminal_safe_json(document)
    assert json.loads(safe) == json.loads(document)
    assert terminal_safe(safe) == safe


@pytest.mark.parametrize("text", ["Grüße, 世界 🙂", "👩‍👩‍👧 می‌خواهم", "tab\tand\nline", "no\u00a0break"])
def test_human_text_is_unchanged(text: str) -> None:
    assert terminal_safe(text) == text


def test_colors_of_program_output_stay_and_end_with_the_line() -> None:
    assert with_styles("\x1b[31mred\x1b[0m \x1b[2Jclear") == "\x1b[31mred\x1b[0m �[2Jclear\x1b[0m"
    assert with_styles(EVIL) == terminal_safe(EVIL)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.handlers[:], logger.level, logger.propagate
    yield get_logger("worker")
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_log_lines_cannot_be_forged(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    forged = f"oh no{EVIL}\n12:00:00 INFO    all is well"
    log.warning("task %s failed: %s", forged, forged)
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("it failed")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "all is well" in line] != []
    assert not [line for line in lines if line.startswith("12:00:00")]
    assert len([line for line in lines if not line.startswith("    ")]) == 2, "one line at the margin for each record"
    assert terminal_safe("\n".join(lines)) == "\n".join(lines)


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\nb", "a\tb", "a\x9bb", "a\u202eb", "a\0", "\ud800", "", "x" * 501])
def test_tags_and_keys_with_control_characters_are_rejected(text: str) -> None:
    app = Orchestrator(database_url="postgresql://nowhere", redis_url="redis://nowhere")
    task = app.task(name="job")(lambda: None)

    @app.workflow(name="code")
    async def code(ctx: object) -> None: ...

    for give in (
        lambda: app.workflows["nightly"].options(tags=[text]),
        lambda: app.workflows["nightly"].options(key=text),
        lambda: app.flows["order"].options(tags=[text]),
        lambda: app.flows["order"].options(key=text),
        lambda: code.starting(id=text),
        lambda: code.starting(tags=[text]),
    ):
        with pytest.raises(InvalidWorkflow, match=r"printable"):
            give()
    for name in ("idempotency_key", "unique_key", "concurrency_key"):
        with pytest.raises(InvalidTask, match=r"printable"):
            key: Any = {name: text}
            task.options(**key)


@pytest.mark.slow
def test_invalid_unicode_can_be_printed() -> None:
    shown = f"terminal_safe({EVIL!r}), one_line({EVIL!r}), indented({EVIL!r})"
    code = f"from orchestrator.terminal_safe import *; print({shown})"
    subprocess.run([sys.executable, "-X", "utf8", "-c", code], check=True, capture_output=True)
    assert indented("a\nb") == "a\n    b"
