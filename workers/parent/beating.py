"""The heartbeats of a worker's processes, which their parent sends for them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import names_digest
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.parent.child import Child, ParentProcess
from orchestrator.workers.parent.messages import Command
from orchestrator.workers.spec import WorkerSpec

log = get_logger("worker")

_SAY_UNHEARD = 60.0
"""Seconds between two log lines about lost heartbeats."""
_PUBLISH_AGAIN = 600.0
"""Seconds after which parameters of tasks are published again: Redis may have lost them before the leader read them."""

_CHANGING = 60.0
"""Seconds for which the leader may have another number of shards: while it is changed, the old one is still there."""


class Beating:
    """Sends heartbeats, and pauses processes whose heartbeats did not arrive for longer than a TTL."""

    def __init__(self, streams: WorkerStreams, spec: WorkerSpec, settings: Settings) -> None:
        self._streams = streams
        self._spec = spec
        self._settings = settings
        self.own = ParentProcess()
        self._number = 0
        self._last: float | None = None
        self._say_unheard_at = 0.0
        """When lost heartbeats are logged next."""
        self._publish_at: dict[bytes, float] = {}
        """When parameters of tasks that were published are published again."""
        self._knows_shards = settings.shard > 0  # it is for the first shard's to say
        self._say_shards_at: float | None = None
        """When it is logged if the leader still has another number of them."""

    def is_heard(self, now: float) -> bool:
        """Say whether the last heartbeats have just been sent."""
        return self._last is not None and now - self._last < 2 * self._settings.heartbeat + 1.0

    def beat(self, ready: Sequence[Child], asks: Child | None, now: float) -> bool:
        """Beat for processes, one of which `asks` the leader whether work waits; False if there are none."""
        if not ready:
            self._last = None  # there was no process to report
            return False
        if self._last is not None and now - self._last > self._settings.worker_ttl:
            self._pause(ready, now, now - self._last)
        self._number += 1
        by_names: dict[str, list[Child]] = {}
        for child in ready:
            by_names.setdefault(names_digest(child.names or []), []).append(child)
        for alike in by_names.values():
            beats = [child.heartbeat(self._spec, self._number, self.own, hungry=child is asks) for child in alike]
            self._streams.beat(beats, alike[0].names or [], self._settings.worker_ttl)
        for parameters in {child.parameters for child in ready} - {b""}:
            if now >= self._publish_at.get(parameters, now):
                self._streams.publish_parameters(parameters)
                self._publish_at[parameters] = now + _PUBLISH_AGAIN
        self._last = now
        self._say_unheard_at = 0.0
        self.check_shards(now)
        return True

    def check_shards(self, now: float) -> None:
        """Say once that the leader has another number of shards, and has had it for a while."""
        if self._knows_shards or (found := self._streams.shards_of_leader()) is None:
            return
        own = self._settings.shards
        if self._say_shards_at is None:
            self._say_shards_at = now + _CHANGING
        self._knows_shards = found == own or now >= self._say_shards_at
        if found != own and self._knows_shards:
            wrong = (
                f"Setting shards is {own}, and {found} at the scheduler that leads, so shards are left without "
                f"workers, or workers without tasks. Set ORCHESTRATOR_SHARDS to one number for all processes."
            )
            log.warning("service.misconfigured: %s", wrong)

    def _pause(self, ready: Sequence[Child], now: float, unheard: float) -> None:
        """Let nothing be started until the leader has said which attempts still count."""
        if now >= self._say_unheard_at:
            self._say_unheard_at = now + _SAY_UNHEARD
            log.warning(
                "worker.cut_off seconds=%.1f: no heartbeat got through; the worker asks which of its tasks still count",
                unheard,
            )
        for child in ready:
            if not child.doubtful:  # once: one that stands still would not read it
                child.doubtful = True
                child.send(Command("pause"))
