"""The parent of a worker's processes: sends their heartbeats, passes orders on, and replaces processes.

The parent runs no tasks, so no task can starve the heartbeats. When a child dies, the parent still has the table of the
child's attempts, and reports them as lost at once. If the parent was stopped or cut off for longer than a worker's TTL,
its children start no tasks until the leader has said which attempts still count. The parent sleeps until a signal, a
message or death of a child, an order of the leader, or the next heartbeat.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import Returned
from orchestrator.prerequisites import Prerequisites
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger, retry_log
from orchestrator.terminal_safe import without_password
from orchestrator.transport.codec import Order
from orchestrator.transport.connection import UNAVAILABLE, connect, describe, prerequisite
from orchestrator.transport.keys import Keys
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.parent.beating import Heartbeats
from orchestrator.workers.parent.changes import Changes
from orchestrator.workers.parent.child import Child, prepare_forks, start_child
from orchestrator.workers.parent.held import EndedProcesses, Farewell
from orchestrator.workers.parent.messages import Command, FirstToReport, Hello, Leaving
from orchestrator.workers.parent.observed import ObservedWorker
from orchestrator.workers.parent.processes import cheap_resident_memory, describe_exit, format_memory, resident_memory
from orchestrator.workers.parent.scaling import Autoscaler, Bounds, ChildState, max_processes, plan
from orchestrator.workers.parent.signal_wakeup import SignalWakeup
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_FINAL_REPORTS_TIMEOUT = 5.0
"""Seconds to report the attempts of the last children. After that the leader finds them lost."""
_RESTART_PAUSE = 1.0
"""Seconds between the starts of two processes that replace dead ones."""
_RELOAD_RETRY = 30.0
"""Seconds until loading the application is retried, if it has been loaded before and now fails."""


def run_worker(spec: WorkerSpec, settings: Settings) -> int:
    """Run a worker until it is stopped. Return the exit code."""
    url = settings.require_redis()
    log.info("worker.started app=%s redis=%s", spec.app, without_password(url))
    prerequisites = Prerequisites(log, [prerequisite(connect(url))])
    supervisor = Supervisor(spec, settings)
    with supervisor.observed.served_by_thread():  # the thread ends before anything is forked
        if not prerequisites.wait():
            return 0
    return supervisor.run(prerequisites)


class Supervisor:
    """Forks, monitors and replaces the processes of a worker."""

    def __init__(self, spec: WorkerSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        self._streams = WorkerStreams(connect(settings.require_redis()), Keys.of(settings))
        self._inbox = self._streams.order_inbox()
        self._children: dict[int, Child] = {}
        self._ended_processes = EndedProcesses(self._streams)
        self._heartbeats = Heartbeats(self._streams, spec, settings)
        self._redis = Outage(log, "Redis", "tasks continue, but their reports wait")
        self._beat_at = 0.0
        self._fleet_changed = False
        """Whether to notify the leader of a change at once."""
        self._start_after = 0.0
        self._broken_until = 0.0
        """Time until which no processes are started, because the application failed to load (monotonic clock)."""
        self._died_at = float("-inf")
        self._signals = 0
        self._drain_ordered = False
        """Whether the leader has ordered a drain. A later signal counts as the first one."""
        self._is_closing = False
        """Whether no more processes are started."""
        self._is_draining = False
        self._exit_code = 0
        self.observed = ObservedWorker(settings, spec.concurrency, self._redis)
        bounds = Bounds(*(spec.autoscale or (spec.processes, spec.processes)))
        self._autoscaler = Autoscaler(bounds, settings.scale_down_after)
        self._changes = Changes(Path.cwd()) if spec.reload else None
        self._is_proven = not spec.reload
        """Whether the current version of the application has been loaded. Until then, one process tries alone."""
        self._was_loaded = False
        self._awaits_change = False
        self._unserved: list[str] = []
        """Queues that were last logged as not served."""

    def run(self, prerequisites: Prerequisites) -> int:
        """Supervise until every child has ended."""
        self.observed.children = self._children.values()
        self._wakeup = SignalWakeup(
            {
                signal.SIGTERM: self._on_signal,
                signal.SIGINT: self._on_signal,
                signal.SIGHUP: self._on_hangup,
                signal.SIGCHLD: lambda: None,
            }
        )
        prepare_forks(self._spec)
        if prerequisites.is_stopped:
            self._on_signal()  # signaled before the wakeup was installed
        give_up_at = float("inf")
        while (
            not self._is_closing
            or self._children
            or (self._ended_processes.has_reports and time.monotonic() < give_up_at)
        ):
            if self._is_closing and not self._children:
                give_up_at = min(give_up_at, time.monotonic() + _FINAL_REPORTS_TIMEOUT)
            try:
                self._step(time.monotonic())
                self._redis.worked()
            except UNAVAILABLE as error:
                self._redis.failed(describe(error))
                self._sleep(min(0.5, self._settings.heartbeat))
        log.info("worker.stopped attempts_returned=%d", self.observed.handed_back)
        return self._exit_code

    def _step(self, now: float) -> None:
        self._reap(now)
        self._receive_messages()
        self._handle_signals()
        self._check_files(now)
        self._adjust_processes(now)
        if now >= self._beat_at:
            self._beat_at = now + self._settings.heartbeat
            self._check_children(now)
            self._beat(now)
            retry_log()
        if self._fleet_changed:
            self._beat(now)
            self._streams.greet()
            self._fleet_changed = False
        self._ended_processes.report()
        self._inbox.ask(self._settings.heartbeat)
        self._wait(now)

    def _wait(self, now: float) -> None:
        wakeups = [self._beat_at]
        if self._start_after > now:
            wakeups.append(self._start_after)
        if self._changes is not None:
            wakeups.append(self._changes.due_at)
        if self._ended_processes.has_reports:
            wakeups.append(now + 0.1)  # Redis has no generation yet, or takes no reports
        orders = [self._inbox] if self._inbox.is_open else []
        if self._inbox in self._sleep(max(0.0, min(wakeups) - time.monotonic()), orders):
            for worker, order in self._inbox.read():
                self._apply_order(worker, order)

    def _sleep(self, seconds: float, readers: Sequence[Any] = ()) -> list[Any]:
        """Sleep until a signal, a message of a child, or one of `readers`. Return the objects that are ready."""
        pipes = [child.pipe for child in self._children.values() if not child.is_closed]
        sockets = self.observed.waits_for()
        ready: list[Any] = wait([self._wakeup, *pipes, *readers, *sockets], seconds)  # type: ignore[list-item]
        if self._wakeup in ready:
            self._wakeup.silence()
        self.observed.serve(ready)
        return ready

    # -- children

    def _adjust_processes(self, now: float) -> None:
        """Start and retire processes to match the wanted number."""
        self._resolve_spent(now)
        if self._is_closing or self._awaits_change:
            return
        children = list(self._children.values())
        wanted = self._autoscaler.wanted if self._is_proven else 1
        start, retire = plan([child.state for child in children], wanted, max_processes(self._autoscaler.wanted))
        for index in retire:
            log.info("process.retiring pid=%d: it finishes its running tasks", children[index].pid)
            children[index].begin_draining(Command("retire"))
            self._fleet_changed = True
        if start and now >= self._start_after:
            first_to_report = FirstToReport()
            for _ in range(start):
                child = start_child(self._spec, self._settings, self._release_parent_resources, first_to_report)
                self._children[child.pid] = child
            first_to_report.close()

    def _release_parent_resources(self) -> None:
        """In a forked process, close resources of the parent."""
        self._wakeup.remove()
        self.observed.close_in_fork()

    def _resolve_spent(self, now: float) -> None:
        """Handle processes that wait for a successor: retire them if the worker ends, or keep them if loading fails."""
        for child in self._children.values():
            if not child.spent or child.draining:
                continue
            if self._is_closing:
                child.begin_draining(Command("retire"))
            elif self._awaits_change or now < self._broken_until:
                child.spent, child.worn = False, True
                child.send(Command("stay"))

    def _receive_messages(self) -> None:
        """Handle messages of the children. The leader is notified at once of ready and leaving processes."""
        for child in self._children.values():
            for message in child.receive():
                self._fleet_changed = True
                if isinstance(message, Hello):
                    self._on_ready(child, message)
                else:
                    self._replace(child, message)

    def _on_ready(self, child: Child, hello: Hello) -> None:
        child.names, child.queues, child.memory = hello.names, hello.queues, cheap_resident_memory(child.pid)
        child.release, child.parameters = hello.release, hello.parameters
        self._inbox.add(child.worker)
        self._is_proven = self._was_loaded = True
        for old in self._children.values():
            if old.spent and not old.draining:
                old.begin_draining(Command("retire"))
                break
        log.info(
            "process.ready pid=%d queues=%s concurrency=%d", child.pid, ",".join(child.queues), self._spec.concurrency
        )
        if hello.unserved and hello.unserved != self._unserved:
            unserved = ", ".join(hello.unserved)
            log.warning(
                "worker.queues_not_served queues=%s: the application names them. Choose with --queues; '*' is all",
                unserved,
            )
        self._unserved = hello.unserved

    def _replace(self, child: Child, leaving: Leaving) -> None:
        log.info("process.replaced pid=%d reason=%r", child.pid, leaving.reason)
        self.observed.replaced += 1
        if not leaving.at_once:
            child.worn = True
        elif leaving.is_last:
            child.draining = True
        else:
            child.spent = True

    def _check_children(self, now: float) -> None:
        """Measure the children's memory, replace those that are too large, and kill those that are blocked."""
        is_delivering = self._heartbeats.is_delivering(now)
        self._heartbeats.own.memory = cheap_resident_memory(os.getpid())
        limit = self._spec.max_memory
        for child in self._children.values():
            child.memory = cheap_resident_memory(child.pid) if limit is None else resident_memory(child.pid)
            if child.names is None or child.dismissed:
                continue
            if child.is_foreign():
                log.error(
                    "process.killed pid=%d: a task closed the process's files, or replaced its program", child.pid
                )
                child.kill()
                continue
            if limit is not None and child.memory > limit and child.state is ChildState.WORKING:
                self._replace(child, Leaving(f"it uses {format_memory(child.memory)}", at_once=False))
            grace = self._settings.stop_grace
            if is_delivering and child.has_stalled(now, grace):
                held = ", ".join(to_text(id) for id, _ in child.held.unended()[:3])
                log.warning(
                    "process.blocked pid=%d seconds=%g tasks=%s: a task blocks it, or the process was paused",
                    *(child.pid, grace, held or "none"),
                )
            if is_delivering and child.has_overrun_drain(now, self._settings.drain_timeout + grace):
                log.error("process.killed pid=%d: it was draining and blocked; its tasks are returned", child.pid)
            elif is_delivering and child.must_be_killed(now, grace):
                log.error("process.killed pid=%d: a task must stop, but blocks the whole process", child.pid)
            elif is_delivering and child.is_blocked_by_turn():
                log.error(
                    "process.killed pid=%d: the code of a workflow does not return and blocks the whole process",
                    child.pid,
                )
            else:
                continue
            child.dismiss()

    def _reap(self, now: float) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            child.pipe.close()
            self._inbox.remove(child.worker)
            farewell = child.held.farewell
            in_order = farewell in (Farewell.FINISHED, Farewell.UNFINISHED)
            died_of = describe_exit(os.waitstatus_to_exitcode(status))
            reports = child.final_reports(now, died_of)
            handed_back = sum(isinstance(report, Returned) for report in reports)
            self.observed.handed_back += child.held.handed_back + handed_back
            self._ended_processes.add(child.worker, reports, in_order=in_order)
            if farewell in (Farewell.UNUSABLE, Farewell.BROKEN):
                self._cannot_load(now, mendable=farewell is Farewell.BROKEN or self._was_loaded)
            elif not in_order and not child.dismissed:
                self.observed.deaths += 1
                log.error("process.died pid=%d reason=%r tasks=%d: its tasks run again", pid, died_of, len(reports))
                self._start_after = max(self._start_after, self._died_at + _RESTART_PAUSE)
                self._died_at = max(now, self._start_after)

    def _cannot_load(self, now: float, *, mendable: bool) -> None:
        """Decide how to continue without the application. The error has been logged."""
        if self._changes is not None and mendable:
            self._awaits_change = True
            log.error("app.not_loaded: the worker waits for the next change of a file")
        elif any(child.names is not None and not child.draining for child in self._children.values()):  # or is spent
            self._start_after = self._broken_until = now + _RELOAD_RETRY
            log.error("app.not_loaded: the worker continues with the processes that loaded it before")
        else:
            self._exit_code = 1
            self._signals = max(1, self._signals)
            for child in self._children.values():
                if child.names is None:  # a process that still loads the application would fail alike
                    child.dismiss()

    def _check_files(self, now: float) -> None:
        """With `reload`: when a file has changed, drain the processes that have loaded the old version."""
        if self._changes is None or self._is_closing or not (changed := self._changes.poll(now)):
            return
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        log.info("app.changed files=%s%s: the worker restarts", ",".join(changed[:3]), more)
        self._awaits_change = self._is_proven = False
        for child in self._children.values():
            if child.names is None:
                child.dismiss()
            elif not child.draining:
                child.begin_draining(Command("drain"))
                self._fleet_changed = True

    # -- heartbeats and orders

    def _beat(self, now: float) -> None:
        for child in self._children.values():
            child.held.write_parent_beat(now)
        ready = [child for child in self._children.values() if child.names is not None]
        if self._heartbeats.send(ready, self._scale() if ready else None, now):
            self.observed.heard_at = now

    def _apply_order(self, worker: str, order: Order) -> None:
        child = next((child for child in self._children.values() if child.worker == worker), None)
        if child is None:
            return
        if order.stop:
            child.stop(order.stop, time.monotonic(), order.moved)
        if order.spare:
            child.send(Command("spare", spare=order.spare))
        if order.go_on and child.doubtful:
            child.doubtful = False
            child.send(Command("resume"))
        if order.drain and not child.draining:
            self._is_closing = True  # the queues are empty
            child.begin_draining(Command("drain"))
        if order.end and not self._drain_ordered:
            log.info("worker.drain_ordered: the worker finishes its tasks and ends")
            self._drain_ordered = True
        if order.work_waits:
            self._scale(work_waits=True)

    # -- scaling

    def _scale(self, *, work_waits: bool = False) -> Child | None:
        """Adjust the wanted number of processes to the load. Return a process that should ask the leader for work."""
        working = [child for child in self._children.values() if child.state in (ChildState.WORKING, ChildState.WORN)]
        load = sum(child.held.pulse()[1] for child in working)
        before = self._autoscaler.wanted
        if self._autoscaler.note(len(working), load, time.monotonic(), work_waits=work_waits):
            log.info("worker.scaling from=%d to=%d", before, self._autoscaler.wanted)
        return working[0] if self._autoscaler.could_use_more(len(working), load) else None

    # -- the end

    def _handle_signals(self) -> None:
        if (self._signals or self._drain_ordered) and not self._is_draining:
            if any(not child.dismissed for child in self._children.values()):
                limit, hint = self._settings.drain_timeout, "again" if self._signals else "SIGTERM twice"
                log.info("worker.draining timeout=%gs: the worker finishes its tasks (%s to stop at once)", limit, hint)
            self._is_closing = self._is_draining = True
            for child in self._children.values():
                child.begin_draining(Command("drain"))
            self._fleet_changed = True
        if self._signals > 1:
            for child in self._children.values():
                child.kill()

    def _on_signal(self) -> None:
        self._signals += 1

    def _on_hangup(self) -> None:
        """Drain when the terminal is closed. Repeated SIGHUP, from the shell and the kernel, does not stop at once."""
        self._signals = max(1, self._signals)
