"""What one attempt prints, until it is passed on: to the log of the worker, and to what is kept of the attempt.

To its task, a piece costs an append. It is passed on at once while the task prints little, so that it is there if the
process dies. Of a task that prints more than `_AT_ONCE` pieces in `_TICK` seconds, pieces gather until there are
`_MANY`, and a thread passes on what is there after each `_TICK`.
"""

from __future__ import annotations

import select
import threading
import time
from typing import Protocol

from orchestrator.nonblocking_log import nonblocking_handlers
from orchestrator.workers.running.forks import is_fork
from orchestrator.workers.running.job import Job

_TICK = 0.1
_AT_ONCE = 100
_MANY = 2_000
LONGEST_PIECE = 10_000
"""Characters that are kept until their line ends."""
_BURST = 2_000_000
"""Characters that an attempt prints into the log of its worker as fast as it can; beyond that, `RATE` a second."""
RATE = 200_000


class Output(Protocol):
    """Where something is printed to: standard output, or error."""

    def print_lines(self, job: Job, room: LogBudget, text: str) -> None:
        """Pass on lines, without the end of the last."""

    def log_dropped(self, job: Job, lines: int) -> None:
        """Say how many lines the log of the worker does not have."""


class PrintBuffer:
    """Printed text of one attempt that is not passed on yet."""

    __slots__ = (
        "_cut",
        "_job",
        "_lock",
        "_outputs",
        "_rests",
        "_room",
        "_tick_ends",
        "_told",
        "output",
        "pass_on_at",
        "pieces",
    )

    def __init__(self, job: Job, output: Output) -> None:
        self._job = job
        self.output = output
        """To which the latest piece was printed."""
        self.pieces: list[str] = []
        self.pass_on_at = 1
        """How many pieces are passed on."""
        self._outputs: list[tuple[int, Output]] = [(0, output)]
        """From which piece on they were printed to which output."""
        self._rests: dict[Output, str] = {}
        """Lines that have not ended."""
        self._cut: set[Output] = set()
        """Those whose line was too long, and was passed on before its end: the rest of it is left out."""
        self._room = LogBudget()
        self._told = 0
        """How often the task has passed something on in this tick."""
        self._tick_ends = 0.0
        self._lock = threading.RLock()

    def put(self, output: Output, text: str) -> None:
        """Take a piece that is long, or goes to another output than the one before."""
        with self._lock:
            if self.output is not output:
                self._outputs.append((len(self.pieces), output))
                self.output = output
            self.pieces.append(text)
            if len(text) > LONGEST_PIECE or len(self.pieces) >= self.pass_on_at:
                self.pass_on()

    def pass_on(self, *, is_last: bool = False) -> None:
        """Pass on the lines that have ended, and the others too if nothing follows."""
        if not self.pieces and self.pass_on_at == 1 and not is_last:
            return  # and no other thread passes on anything at this moment
        with self._lock:
            now = time.monotonic()
            if now >= self._tick_ends and self.pass_on_at == 1:
                self._tick_ends, self._told = now + _TICK, 0
            self._told += 1
            if self._told > _AT_ONCE and self.pass_on_at == 1 and not is_fork():
                self.pass_on_at = _MANY
                PUMP.add(self)
            self._pass_on()
            if is_last:
                rests, self._rests = self._rests, {}
                for output, rest in rests.items():
                    output.print_lines(self._job, self._room, rest)
                self.output.log_dropped(self._job, self._room.close())

    def pass_on_later(self) -> None:
        """Pass on what a tick has gathered; a task that prints little from now on does so itself."""
        with self._lock:
            if len(self.pieces) <= _AT_ONCE and not self._told:
                self.pass_on_at = 1
                PUMP.remove(self)
            self._told = 0
            self._pass_on()

    def forked(self) -> None:
        """Forget what the process has to pass on that this one is a copy of."""
        self._lock = threading.RLock()
        self._rests.clear()
        self._cut.clear()
        self.pieces.clear()
        self._outputs = [(0, self.output)]
        self.pass_on_at = 1

    def _pass_on(self) -> None:
        count, outputs = len(self.pieces), self._outputs  # others append meanwhile
        if not count:
            return
        pieces = self.pieces[:count]
        del self.pieces[:count]
        self._outputs = [(0, self.output)]
        ends = [*(first for first, _ in outputs[1:]), count]
        for (first, output), end in zip(outputs, ends, strict=True):
            text = self._rests.pop(output, "") + "".join(pieces[first:end])
            if output in self._cut:
                _, newline, text = text.partition("\n")
                if not newline:
                    continue
                self._cut.discard(output)
            ended, newline, rest = text.rpartition("\n")
            if len(rest) > LONGEST_PIECE:
                ended, newline, rest = text, "\n", ""
                self._cut.add(output)
            if rest:
                self._rests[output] = rest
            if newline:
                output.print_lines(self._job, self._room, ended)


class LogBudget:
    """How much of what an attempt prints the log of its worker takes: a burst, and then so much a second."""

    __slots__ = ("_at", "_left", "_left_out")

    def __init__(self) -> None:
        self._left = float(_BURST)
        self._at = time.monotonic()
        self._left_out = 0
        """Lines that were dropped, and that no line mentions yet."""

    def take(self, text: str) -> tuple[int, str]:
        """Return the lines of a text that are to be written, and how many were left out before them."""
        now = time.monotonic()
        self._left = min(_BURST, self._left + RATE * (now - self._at))
        self._at = now
        if self._left_out and self._left < RATE:
            self._left_out += text.count("\n") + 1
            return 0, ""
        before, self._left_out = self._left_out, 0
        if len(text) >= self._left:
            written = text[: max(0, text.rfind("\n", 0, int(self._left)))]
            self._left_out = text.count("\n", len(written)) + (not written)
            text = written
        self._left -= len(text) + 1
        return before, text

    def close(self) -> int:
        """Return how many lines were left out at last."""
        left_out, self._left_out = self._left_out, 0
        return left_out


class Pump:
    """Passes on what tasks print that print much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[int, PrintBuffer] = {}
        self._something = threading.Event()
        self._started = False

    def add(self, buffer: PrintBuffer) -> None:
        """Pass on what is in a buffer after each tick, as long as there is much."""
        with self._lock:
            self._buffers[id(buffer)] = buffer
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="printed", daemon=True).start()
        self._something.set()

    def remove(self, buffer: PrintBuffer) -> None:
        """Let a task pass on what it prints itself."""
        with self._lock:
            self._buffers.pop(id(buffer), None)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._something.wait()
            self._something.clear()
            while self._buffers or any(handler.is_behind for handler in nonblocking_handlers()):
                pause.wait(_TICK)
                for buffer in list(self._buffers.values()):
                    buffer.pass_on_later()
                self._write_more()

    def _write_more(self) -> None:
        """Write what readers of the log had no room for, as fast as they make some."""
        give_up_at = time.monotonic() + _TICK
        while behind := [handler for handler in nonblocking_handlers() if handler.is_behind]:
            left = give_up_at - time.monotonic()
            if left <= 0:
                return
            try:
                select.select([], [handler.descriptor for handler in behind], [], left)
            except (OSError, ValueError):  # a task has closed it
                return
            for handler in behind:
                handler.retry()


PUMP = Pump()
"""Of this process."""
