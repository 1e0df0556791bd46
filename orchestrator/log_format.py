"""How a line of the log looks: text for people, or one JSON object for machines.

A message of ours begins with the stable name of its event, and `key=%s` in it are its fields: "worker.lost worker=%s
attempts=%d: its attempts run again". Text shows it as it stands; JSON has `event` and the fields beside the message.
A record may know the attempt that it is about, in the attributes of `TASK_FIELDS`. What others have written is shown
and not obeyed: it commands no terminal, and in text no line but the first of a record begins at the margin.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring

from orchestrator.terminal_safe import indented, one_line, terminal_safe, terminal_safe_json, with_styles
from orchestrator.trace_context import log_fields

TASK_FIELDS = ("task_id", "task_name", "run_id", "attempt", "queue")
"""What a record that is about an attempt knows of it."""
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_COLOURS = {logging.DEBUG: 2, logging.INFO: 32, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
_A_LINE = "\x00"
"""Stands for a line in the first document of many; no field before it has one."""
EVENT = re.compile(r"[a-z]+\.[a-z_]+(?=[ :]|$)")
_OUR_LOGGERS = re.compile(r"orchestrator\.(?!tasks$)[a-z-]+")
"""Those of the users' own lines are orchestrator.tasks and, for each workflow, orchestrator.workflow.NAME."""
_PLACEHOLDER = re.compile(r"(?:\b(\w+)=)?%[-+ #0-9.]*[a-z]")
_DIM, _CYAN = 2, 36
_BRIEF_LEVELS = {10: "DEBUG", 20: "INFO ", 30: "WARN ", 40: "ERROR", 50: "FATAL"}
_BRIEF_ID = 18
"""Of two ids of the same millisecond, so many characters are the same once in four thousand times."""


_shown = lru_cache(maxsize=1_000)(one_line)
"""Names and ids of tasks come again and again."""


class TextFormatter(logging.Formatter):
    """Time, level, the task, and the message; a traceback stands below.

    For a person it may be `brief`: times without dates, and of ids as much as commands need to find them.
    """

    def __init__(self, *, brief: bool = False, colours: bool = False) -> None:
        super().__init__(datefmt="%H:%M:%S" if brief else "%Y-%m-%d %H:%M:%S")
        self._id_length = _BRIEF_ID if brief else None
        self._levels = _BRIEF_LEVELS if brief else {}
        self._colours = colours
        self._clock = -1, ""
        """The latest second, and how it is shown."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as lines of text."""
        body = record.getMessage()
        if trace := _traceback(self, record):
            body = f"{body}\n{trace}"
        if not self._colours:
            return self._head(record) + indented(body)
        return self._head(record) + "\n    ".join(map(with_styles, body.split("\n")))

    def format_lines(self, record: logging.LogRecord, lines: list[str]) -> str:
        """Return lines as the records that they would be with all else of this one."""
        head, text = self._head(record), "\n".join(lines)
        if self._colours:
            text = "\n".join(map(with_styles, lines))
        else:
            text = terminal_safe(text)
        return head + text.replace("\n", f"\n{head}") + "\n"

    def _head(self, record: logging.LogRecord) -> str:
        level = self._paint(self._levels.get(record.levelno, f"{record.levelname:<7}"), _COLOURS.get(record.levelno, 0))
        return f"{self._paint(self._time(record), _DIM)} {level} {self._whose(record)}"

    def _time(self, record: logging.LogRecord) -> str:
        second, shown = self._clock
        if second != int(record.created):
            shown = self.formatTime(record, self.datefmt)
            self._clock = int(record.created), shown
        return shown

    def _whose(self, record: logging.LogRecord) -> str:
        """Return which task speaks, or which run of a workflow as code."""
        name = getattr(record, "task_name", None) or getattr(record, "workflow", None)
        identifier = getattr(record, "task_id", None) or getattr(record, "run_id", None)
        if not name or not identifier:
            return ""
        shown = _shown(str(identifier))[: self._id_length]
        return f"{self._paint(_shown(str(name)), _CYAN)}{self._paint(f'[{shown}]', _DIM)} "

    def _paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour else text


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        return terminal_safe_json(self._document(record, record.getMessage()))

    def format_lines(self, record: logging.LogRecord, lines: list[str]) -> str:
        """Return lines as the records that they would be with all else of this one."""
        head, _, tail = self._document(record, _A_LINE).partition(json.dumps(_A_LINE))
        said = "".join([f"{head}{encode_basestring(line)}{tail}\n" for line in lines])
        return terminal_safe_json(said)

    def _document(self, record: logging.LogRecord, message: str) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": message,
        }
        for name, value in vars(record).items():  # whose it is, and what `extra` has given it
            if name not in _OF_EVERY_RECORD and (name not in TASK_FIELDS or value != ""):
                fields.setdefault(name, value)
        for name, value in (*log_fields().items(), *event_fields(record)):
            fields.setdefault(name, value)
        if trace := _traceback(self, record):
            fields["exc"] = trace
        return _encode(fields)


def event_fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """Yield the name of the event that a message of ours begins with, and its fields; nothing for other messages."""
    if not _OUR_LOGGERS.fullmatch(str(record.name)) or (event := EVENT.match(str(record.msg))) is None:
        return
    yield "event", event[0]
    if isinstance(record.args, tuple):
        keys = [placeholder[1] for placeholder in _PLACEHOLDER.finditer(record.msg)]
        yield from ((key, value) for key, value in zip(keys, record.args, strict=False) if key)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    parts = (record.exc_text, formatter.formatStack(record.stack_info) if record.stack_info else "")
    return "\n".join(part for part in parts if part)
