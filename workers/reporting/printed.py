"""Buffers the printed output of an attempt, on its way to the worker's log and to the stored log of the attempt.

A print costs the task an append. While the task prints little, each piece is flushed at once, so that it is not lost if
the process dies. If a task prints more than `_MAX_IMMEDIATE` pieces in `_TICK_SECONDS`, pieces are buffered up to
`_BATCH_PIECES`, and a thread flushes them after each tick.
"""

from __future__ import annotations

import select
import threading
import time
from typing import Protocol

from orchestrator.nonblocking_log import nonblocking_handlers
from orchestrator.workers.running.forks import is_fork
from orchestrator.workers.running.job import Job

_TICK_SECONDS = 0.1
_MAX_IMMEDIATE = 100
_BATCH_PIECES = 2_000
MAX_PIECE_LENGTH = 10_000
"""Characters of an unfinished line that are buffered, at most."""
_BURST = 2_000_000
"""Characters that an attempt may print into its worker's log without delay; beyond that, `RATE` per second."""
RATE = 200_000


class Output(Protocol):
    """A destination of printed lines: standard output or standard error."""

    def print_lines(self, job: Job, budget: LogBudget, text: str) -> None:
        """Log lines. The last one comes without its line end."""

    def log_dropped(self, job: Job, lines: int) -> None:
        """Log how many lines were left out of the worker's log."""


class PrintBuffer:
    """Printed text of one attempt that is not flushed yet."""

    __slots__ = (
        "_budget",
        "_flush_count",
        "_job",
        "_lock",
        "_outputs",
        "_tick_ends",
        "_truncated",
        "_unfinished",
        "flush_at",
        "output",
        "pieces",
    )

    def __init__(self, job: Job, output: Output) -> None:
        self._job = job
        self.output = output
        """The output of the latest piece."""
        self.pieces: list[str] = []
        self.flush_at = 1
        """Number of pieces at which the buffer is flushed."""
        self._outputs: list[tuple[int, Output]] = [(0, output)]
        """Outputs, each with the index of its first piece."""
        self._unfinished: dict[Output, str] = {}
        """Unfinished lines by output."""
        self._truncated: set[Output] = set()
        """Outputs whose line was too long and was flushed early; the rest of that line is left out."""
        self._budget = LogBudget()
        self._flush_count = 0
        """How often the task has flushed in this tick."""
        self._tick_ends = 0.0
        self._lock = threading.RLock()

    def put(self, output: Output, text: str) -> None:
        """Add a piece that is long, or that goes to another output than the one before."""
        with self._lock:
            if self.output is not output:
                self._outputs.append((len(self.pieces), output))
                self.output = output
            self.pieces.append(text)
            if len(text) > MAX_PIECE_LENGTH or len(self.pieces) >= self.flush_at:
                self.flush()

    def flush(self, *, is_last: bool = False) -> None:
        """Flush the finished lines. With `is_last`, flush unfinished lines too."""
        if not self.pieces and self.flush_at == 1 and not is_last:
            return  # and no other thread is flushing
        with self._lock:
            now = time.monotonic()
            if now >= self._tick_ends and self.flush_at == 1:
                self._tick_ends, self._flush_count = now + _TICK_SECONDS, 0
            self._flush_count += 1
            if self._flush_count > _MAX_IMMEDIATE and self.flush_at == 1 and not is_fork():
                self.flush_at = _BATCH_PIECES
                PUMP.add(self)
            self._flush()
            if is_last:
                rests, self._unfinished = self._unfinished, {}
                for output, rest in rests.items():
                    output.print_lines(self._job, self._budget, rest)
                self.output.log_dropped(self._job, self._budget.close())

    def flush_tick(self) -> None:
        """Flush the pieces of a tick. If the task prints little, let it flush on its own again."""
        with self._lock:
            if len(self.pieces) <= _MAX_IMMEDIATE and not self._flush_count:
                self.flush_at = 1
                PUMP.remove(self)
            self._flush_count = 0
            self._flush()

    def forked(self) -> None:
        """Clear the buffer in a forked process: the original process flushes its content."""
        self._lock = threading.RLock()
        self._unfinished.clear()
        self._truncated.clear()
        self.pieces.clear()
        self._outputs = [(0, self.output)]
        self.flush_at = 1

    def _flush(self) -> None:
        count, outputs = len(self.pieces), self._outputs  # other threads append meanwhile
        if not count:
            return
        pieces = self.pieces[:count]
        del self.pieces[:count]
        self._outputs = [(0, self.output)]
        ends = [*(first for first, _ in outputs[1:]), count]
        for (first, output), end in zip(outputs, ends, strict=True):
            text = self._unfinished.pop(output, "") + "".join(pieces[first:end])
            if output in self._truncated:
                _, newline, text = text.partition("\n")
                if not newline:
                    continue
                self._truncated.discard(output)
            ended, newline, rest = text.rpartition("\n")
            if len(rest) > MAX_PIECE_LENGTH:
                ended, newline, rest = text, "\n", ""
                self._truncated.add(output)
            if rest:
                self._unfinished[output] = rest
            if newline:
                output.print_lines(self._job, self._budget, ended)


class LogBudget:
    """Limits what an attempt may print into its worker's log: a burst, then a rate per second."""

    __slots__ = ("_at", "_available", "_dropped")

    def __init__(self) -> None:
        self._available = float(_BURST)
        self._at = time.monotonic()
        self._dropped = 0
        """Lines that were dropped and not yet mentioned."""

    def take(self, text: str) -> tuple[int, str]:
        """Return how many lines were dropped before this text, and the part of the text that may be written."""
        now = time.monotonic()
        self._available = min(_BURST, self._available + RATE * (now - self._at))
        self._at = now
        if self._dropped and self._available < RATE:
            self._dropped += text.count("\n") + 1
            return 0, ""
        before, self._dropped = self._dropped, 0
        if len(text) >= self._available:
            written = text[: max(0, text.rfind("\n", 0, int(self._available)))]
            self._dropped = text.count("\n", len(written)) + (not written)
            text = written
        self._available -= len(text) + 1
        return before, text

    def close(self) -> int:
        """Return the number of lines dropped since the last mention."""
        dropped, self._dropped = self._dropped, 0
        return dropped


class Pump:
    """Flushes, in a thread, the buffers of tasks that print much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[int, PrintBuffer] = {}
        self._has_work = threading.Event()
        self._started = False

    def add(self, buffer: PrintBuffer) -> None:
        """Flush a buffer after each tick, until it is removed."""
        with self._lock:
            self._buffers[id(buffer)] = buffer
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="printed", daemon=True).start()
        self._has_work.set()

    def remove(self, buffer: PrintBuffer) -> None:
        """Let the task flush its buffer on its own again."""
        with self._lock:
            self._buffers.pop(id(buffer), None)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._has_work.wait()
            self._has_work.clear()
            while self._buffers or any(handler.is_behind for handler in nonblocking_handlers()):
                pause.wait(_TICK_SECONDS)
                for buffer in list(self._buffers.values()):
                    buffer.flush_tick()
                self._retry_handlers()

    def _retry_handlers(self) -> None:
        """Write output that readers of the log had no room for, as fast as they read."""
        give_up_at = time.monotonic() + _TICK_SECONDS
        while waiting := [handler for handler in nonblocking_handlers() if handler.is_behind]:
            remaining = give_up_at - time.monotonic()
            if remaining <= 0:
                return
            try:
                select.select([], [handler.descriptor for handler in waiting], [], remaining)
            except (OSError, ValueError):  # a task has closed the file
                return
            for handler in waiting:
                handler.retry()


PUMP = Pump()
"""The pump of this process."""
