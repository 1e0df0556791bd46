"""Log formats: text, or one JSON object per line.

Our own messages start with a stable event name, and contain fields as `key=%s`: "worker.lost worker=%s attempts=%d: its
attempts run again". The text format prints the message; JSON adds `event` and the fields. Records about an attempt have
the attributes `TASK_FIELDS`. Foreign text cannot control the terminal or forge records: control characters are
replaced, and in the text format all but the first line of a record are indented.
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
"""Attributes of records about an attempt."""
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_COLORS = {logging.DEBUG: 2, logging.INFO: 32, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
_LINE = "\x00"
"""A placeholder for a line. No earlier field of a record contains it."""
EVENT = re.compile(r"[a-z]+\.[a-z_]+(?=[ :]|$)")
_OUR_LOGGERS = re.compile(r"orchestrator\.(?!tasks$)[a-z-]+")
"""Our own loggers. Lines of users have the loggers orchestrator.tasks and orchestrator.workflow.NAME."""
_PLACEHOLDER = re.compile(r"(?:\b(\w+)=)?%[-+ #0-9.]*[a-z]")
_DIM, _CYAN = 2, 36
_BRIEF_LEVELS = {10: "DEBUG", 20: "INFO ", 30: "WARN ", 40: "ERROR", 50: "FATAL"}
_BRIEF_ID = 18
"""Displayed characters of an id. Of two ids from the same millisecond, one pair in four thousand looks equal."""


_safe = lru_cache(maxsize=1_000)(one_line)
"""Cached, because names and ids of tasks repeat."""


class TextFormatter(logging.Formatter):
    """Time, level, task and message, followed by the traceback.

    With `brief`, times have no dates, and ids are shortened as far as commands still accept them.
    """

    def __init__(self, *, brief: bool = False, colours: bool = False) -> None:
        super().__init__(datefmt="%H:%M:%S" if brief else "%Y-%m-%d %H:%M:%S")
        self._id_length = _BRIEF_ID if brief else None
        self._levels = _BRIEF_LEVELS if brief else {}
        self._colors = colours
        self._clock = -1, ""
        """The last second, and its text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as lines of text."""
        body = record.getMessage()
        if trace := _traceback(self, record):
            body = f"{body}\n{trace}"
        if not self._colors:
            return self._head(record) + indented(body)
        return self._head(record) + "\n    ".join(map(with_styles, body.split("\n")))

    def format_lines(self, record: logging.LogRecord, lines: list[str]) -> str:
        """Return the lines as records that share everything else with this one."""
        head, text = self._head(record), "\n".join(lines)
        if self._colors:
            text = "\n".join(map(with_styles, lines))
        else:
            text = terminal_safe(text)
        return head + text.replace("\n", f"\n{head}") + "\n"

    def _head(self, record: logging.LogRecord) -> str:
        level = self._paint(self._levels.get(record.levelno, f"{record.levelname:<7}"), _COLORS.get(record.levelno, 0))
        return f"{self._paint(self._time(record), _DIM)} {level} {self._subject(record)}"

    def _time(self, record: logging.LogRecord) -> str:
        second, text = self._clock
        if second != int(record.created):
            text = self.formatTime(record, self.datefmt)
            self._clock = int(record.created), text
        return text

    def _subject(self, record: logging.LogRecord) -> str:
        name = getattr(record, "task_name", None) or getattr(record, "workflow", None)
        identifier = getattr(record, "task_id", None) or getattr(record, "run_id", None)
        if not name or not identifier:
            return ""
        short_id = _safe(str(identifier))[: self._id_length]
        return f"{self._paint(_safe(str(name)), _CYAN)}{self._paint(f'[{short_id}]', _DIM)} "

    def _paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colors and colour else text


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        return terminal_safe_json(self._document(record, record.getMessage()))

    def format_lines(self, record: logging.LogRecord, lines: list[str]) -> str:
        """Return the lines as records that share everything else with this one."""
        head, _, tail = self._document(record, _LINE).partition(json.dumps(_LINE))
        documents = "".join([f"{head}{encode_basestring(line)}{tail}\n" for line in lines])
        return terminal_safe_json(documents)

    def _document(self, record: logging.LogRecord, message: str) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": message,
        }
        for name, value in vars(record).items():  # task fields and the fields in `extra`
            if name not in _OF_EVERY_RECORD and (name not in TASK_FIELDS or value != ""):
                fields.setdefault(name, value)
        for name, value in (*log_fields().items(), *event_fields(record)):
            fields.setdefault(name, value)
        if trace := _traceback(self, record):
            fields["exc"] = trace
        return _encode(fields)


def event_fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """Yield the event name and the fields of one of our own messages. Empty for other messages."""
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
