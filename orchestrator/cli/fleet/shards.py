"""With several shards, a scheduler or worker is a parent process that starts and restarts one child per shard."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from orchestrator.memory import freeze_before_fork
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.workers.parent.processes import describe_exit, die_with

log = get_logger("shards")

_RESTART_PAUSE = 1.0
"""Seconds before a killed child is restarted."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_shards(settings: Settings, run: Callable[[Settings], int]) -> int:
    """Run a child process per shard until all have ended; return the exit code, in each child its own."""
    if settings.shards == 1:
        return run(settings)
    return _Shards(settings, run).run()


class _Shards:
    """The parent process."""

    def __init__(self, settings: Settings, run: Callable[[Settings], int]) -> None:
        self._settings = settings
        self._run = run
        self._children: dict[int, int] = {}
        """Shard numbers by process id."""
        self._is_stopping = False

    def run(self) -> int:
        """Start the children, restart killed ones, and pass signals on."""
        previous_handlers = {number: signal.signal(number, self._stop) for number in _STOP_SIGNALS}
        freeze_before_fork()
        waiting, code = list(range(self._settings.shards)), 0
        while waiting or self._children:
            while waiting and not self._is_stopping:
                shard = waiting.pop(0)
                if (pid := os.fork()) == 0:
                    return self._in_child(shard, previous_handlers)
                self._children[pid] = shard
                if self._is_stopping:  # a stop signal arrived before the child was registered
                    os.kill(pid, signal.SIGTERM)
                log.info("shard.started shard=%d pid=%d", shard, pid)
            if not self._children:
                break
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert info is not None
            pid = info.si_pid
            shard = self._children.pop(pid)  # reap it only then: a signal handler must not kill a reused pid
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if exit_code > 0:  # an error that a restart would repeat
                code = exit_code
                self._stop(signal.SIGTERM)
            elif exit_code < 0 and not self._is_stopping:
                log.error("shard.died shard=%d pid=%d reason=%r: restarting it", shard, pid, describe_exit(exit_code))
                time.sleep(_RESTART_PAUSE)
                waiting.append(shard)
        return code

    def _in_child(self, shard: int, handlers: Mapping[signal.Signals, object]) -> int:
        parent = os.getppid()
        os.setpgid(0, 0)  # the terminal's signals reach only the parent, which passes them on once
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # restored from before the fork
        die_with(parent, signal.SIGTERM)
        return self._run(replace(self._settings.of_shard(shard), metrics=_metrics(self._settings.metrics, shard)))

    def _stop(self, number: int, _: object = None) -> None:
        self._is_stopping = True
        for pid in list(self._children):
            os.kill(pid, number)


def _metrics(address: str, shard: int) -> str:
    """Return the metrics address of a shard: the port plus the shard's number."""
    host, colon, port = address.rpartition(":")
    return f"{host}{colon}{int(port) + shard}" if port.isdecimal() and int(port) else address
