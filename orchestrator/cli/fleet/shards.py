"""One process for each shard: a scheduler or worker with several shards is a parent that starts and replaces them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from orchestrator.memory import settle
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.workers.parent.processes import die_with, ending

log = get_logger("shards")

_BREATHER = 1.0
"""Seconds before a process that was killed is started again."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_shards(settings: Settings, run: Callable[[Settings], int]) -> int:
    """Run the process of each shard until all have ended; return the exit code. It returns in each process, too."""
    if settings.shards == 1:
        return run(settings)
    return _Shards(settings, run).run()


class _Shards:
    """The parent."""

    def __init__(self, settings: Settings, run: Callable[[Settings], int]) -> None:
        self._settings = settings
        self._run = run
        self._children: dict[int, int] = {}
        """Shards, by the ids of their processes."""
        self._is_stopping = False

    def run(self) -> int:
        """Start them, replace those that are killed, and pass signals on."""
        before = {number: signal.signal(number, self._stop) for number in _STOPS}
        settle()
        waiting, code = list(range(self._settings.shards)), 0
        while waiting or self._children:
            while waiting and not self._is_stopping:
                shard = waiting.pop(0)
                if (pid := os.fork()) == 0:
                    return self._in_child(shard, before)
                self._children[pid] = shard
                if self._is_stopping:  # since it was asked last
                    os.kill(pid, signal.SIGTERM)
                log.info("shard.started shard=%d pid=%d", shard, pid)
            if not self._children:
                break
            ended_child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended_child is not None
            pid = ended_child.si_pid
            shard = self._children.pop(pid)  # before its number is free: a signal may come at any time
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if ended > 0:  # what it cannot do, no other one can
                code = ended
                self._stop(signal.SIGTERM)
            elif ended < 0 and not self._is_stopping:
                log.error("shard.died shard=%d pid=%d reason=%r: it is started again", shard, pid, ending(ended))
                time.sleep(_BREATHER)
                waiting.append(shard)
        return code

    def _in_child(self, shard: int, handlers: Mapping[signal.Signals, object]) -> int:
        parent = os.getppid()
        os.setpgid(0, 0)  # a terminal's signals come to the parent, which passes them on, once
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as it was before
        die_with(parent, signal.SIGTERM)
        return self._run(replace(self._settings.of_shard(shard), metrics=_metrics(self._settings.metrics, shard)))

    def _stop(self, number: int, _: object = None) -> None:
        self._is_stopping = True
        for pid in list(self._children):
            os.kill(pid, number)


def _metrics(address: str, shard: int) -> str:
    """Return the address of a shard's metrics: on the ports after the first."""
    host, colon, port = address.rpartition(":")
    return f"{host}{colon}{int(port) + shard}" if port.isdecimal() and int(port) else address
