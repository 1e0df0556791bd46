"""The parent of a worker's processes: it beats for them, passes orders on, and replaces those that die.

It runs nothing itself, so no task can starve the heartbeat. When a child dies, the parent still has the table of
what the child held, and reports those attempts as lost at once. When the parent itself was stopped or cut off for
longer than a worker's TTL, its children start nothing new until the leader has said which attempts still count.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import Any

from orchestrator.domain.task import Flush, Lost, Report, Returned
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Heartbeat, Order, decode, encode, names_digest, unpack_attempts
from orchestrator.transport.connection import UNAVAILABLE, check_server, connect, describe
from orchestrator.transport.keys import Keys
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.held import HeldAttempts
from orchestrator.workers.mortality import die_with
from orchestrator.workers.process import EXIT_UNFINISHED, EXIT_UNUSABLE, Command, Hello
from orchestrator.workers.process import main as run_process
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_LAST_WORDS = 5.0
"""Seconds to report what the last children held; after that the leader finds out by itself."""


def run_worker(spec: WorkerSpec, settings: Settings) -> int:
    """Run a worker until it is told to stop; return the exit code."""
    check_server(connect(settings.require_redis()))
    return Supervisor(spec, settings).run()


class Child:
    """One worker process, as its parent sees it."""

    def __init__(self, worker: str, pid: int, pipe: Connection[Any, Any], held: HeldAttempts) -> None:
        self.worker = worker
        self.pid = pid
        self.pipe = pipe
        self.held = held
        self.started_at = time.time()
        self.names: list[str] | None = None
        self.doubtful = False

    def tell(self, command: Command) -> None:
        """Send a command; a child that is dead is dealt with elsewhere."""
        try:
            self.pipe.send_bytes(encode(command))
        except OSError:
            log.debug("process %d is gone", self.pid)


class Supervisor:
    """Forks, beats, obeys, replaces."""

    def __init__(self, spec: WorkerSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        self._streams = WorkerStreams(connect(settings.require_redis()), Keys())
        self._children: dict[int, Child] = {}
        self._last_order: dict[str, str] = {}
        self._gone: list[str] = []
        """Children that have died and have not been signed off."""
        self._lost: list[Flush] = []
        self._beats = 0
        self._beat_at = 0.0
        self._last_beat: float | None = None
        self._restart_at = 0.0
        self._signals = 0
        self._drain_told = False
        self._exit_code = 0

    def run(self) -> int:
        """Supervise until every child has ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for _ in range(self._spec.processes):
            self._start_child()
        give_up_at = float("inf")
        while self._children or (self._lost and time.monotonic() < give_up_at):
            if not self._children:
                give_up_at = min(give_up_at, time.monotonic() + _LAST_WORDS)
            try:
                self._step()
            except UNAVAILABLE as error:
                log.warning("%s", describe(error))
                time.sleep(min(0.5, self._settings.heartbeat))
        return self._exit_code

    def _step(self) -> None:
        self._reap()
        self._greet_new()
        if self._signals and not self._drain_told:
            log.info("draining: finishing what runs, up to %g s (again to stop at once)", self._settings.drain_timeout)
            self._drain_told = True
            self._tell_all(Command("drain"))
        if self._signals > 1:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat(now)
            self._beat_at = now + self._settings.heartbeat
        self._report_lost()
        if self._drain_told or not self._last_order:
            time.sleep(0.02)  # children start or end within moments, and only waiting tells
        else:
            for worker, order in self._streams.orders(self._last_order, max(0.0, self._beat_at - time.monotonic())):
                self._obey(worker, order)

    # -- children

    def _start_child(self) -> None:
        held = HeldAttempts()
        ours, theirs = Pipe()
        worker = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(4)}"
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                die_with(parent)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                code = run_process(self._spec, self._settings, worker, held, theirs)
            except Exception:
                log.exception("worker process failed")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        self._children[pid] = Child(worker, pid, ours, held)

    def _greet_new(self) -> None:
        """Take in the children that have become ready; the leader hears of them at once."""
        ready = False
        for child in self._children.values():
            if child.names is None and child.pipe.poll():
                try:
                    child.names = decode(Hello, child.pipe.recv_bytes()).names
                except (EOFError, OSError):
                    continue  # it has died, and is reaped in the next round
                self._last_order[child.worker] = "0-0"
                ready = True
                log.info(
                    "process %d ready: queues %s, %d at once",
                    child.pid,
                    ", ".join(self._spec.queues),
                    self._spec.concurrency,
                )
        if ready:
            self._beat(time.monotonic())
            self._streams.greet()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            child.pipe.close()
            self._last_order.pop(child.worker, None)
            code = os.waitstatus_to_exitcode(status)
            lost = unpack_attempts(child.held.snapshot()[0])
            if lost and code == EXIT_UNFINISHED:
                reports: list[Report] = [Returned(task, attempt, "worker stops") for task, attempt in lost]
                self._lost.append(Flush(child.worker, reports))
            elif lost:
                self._lost.append(Flush(child.worker, [Lost(task, attempt, alone=False) for task, attempt in lost]))
            if code == EXIT_UNUSABLE:
                self._exit_code = 1
                self._signals = max(1, self._signals)
            elif code not in (0, EXIT_UNFINISHED):
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                log.error("process %d died (%s) with %d tasks; they will run elsewhere", pid, how, len(lost))
            self._gone.append(child.worker)
            if not self._signals and not (self._spec.burst and code == 0):
                time.sleep(max(0.0, min(1.0, self._restart_at - time.monotonic())))
                self._restart_at = time.monotonic() + 1.0
                self._start_child()

    def _report_lost(self) -> None:
        """Sign off dead children and report what they held; while Redis is away, both wait."""
        if self._gone:
            self._streams.leave(self._gone)
            self._gone = []
        while self._lost:
            generation = self._streams.generation()
            if generation is None:
                return
            if self._streams.flush(generation, encode(self._lost[0]), {}).entry is None:
                return
            self._lost.pop(0)

    # -- heartbeats and orders

    def _beat(self, now: float) -> None:
        ready = [child for child in self._children.values() if child.names is not None]
        if not ready:
            return
        if self._last_beat is not None and now - self._last_beat > self._settings.worker_ttl:
            log.warning("unheard for %.1f s; asking which tasks still count", now - self._last_beat)
            for child in ready:
                child.doubtful = True
                child.tell(Command("pause"))
        self._beats += 1
        self._streams.beat([self._heartbeat(child) for child in ready], ready[0].names or [], self._settings.worker_ttl)
        self._last_beat = now

    def _heartbeat(self, child: Child) -> Heartbeat:
        held, running = child.held.snapshot()
        return Heartbeat(
            worker=child.worker,
            host=socket.gethostname(),
            pid=child.pid,
            queues=list(self._spec.queues),
            slots=self._spec.concurrency,
            names=names_digest(child.names or []),
            generation="",
            started_at=child.started_at,
            held=held,
            running=running,
            doubtful=child.doubtful,
            burst=self._spec.burst,
            draining=self._drain_told,
            number=self._beats,
        )

    def _obey(self, worker: str, order: Order) -> None:
        child = next((child for child in self._children.values() if child.worker == worker), None)
        if child is None:
            return
        if order.stop:
            child.tell(Command("stop", order.stop))
        if order.go_on and child.doubtful:
            child.doubtful = False
            child.tell(Command("resume"))
        if order.drain:
            child.tell(Command("drain"))

    def _tell_all(self, command: Command) -> None:
        for child in self._children.values():
            child.tell(command)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signals += 1
