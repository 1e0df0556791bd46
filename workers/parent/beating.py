"""Sends the heartbeats of a worker's processes."""

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

_LOG_INTERVAL = 60.0
"""Seconds between two log lines about lost heartbeats."""
_REPUBLISH_INTERVAL = 600.0
"""Seconds after which task parameters are published again: Redis may have lost them before the leader read them."""

_RESHARD_GRACE = 60.0
"""Seconds for which the leader may have another number of shards, because the number is just being changed."""


class Heartbeats:
    """Sends heartbeats, and pauses the processes if no heartbeat got through for longer than the worker TTL."""

    def __init__(self, streams: WorkerStreams, spec: WorkerSpec, settings: Settings) -> None:
        self._streams = streams
        self._spec = spec
        self._settings = settings
        self.own = ParentProcess()
        self._number = 0
        self._last_sent_at: float | None = None
        self._log_again_at = 0.0
        """When lost heartbeats may be logged again."""
        self._publish_at: dict[bytes, float] = {}
        """When published task parameters are published again."""
        self._has_checked_shards = settings.shard > 0  # only the first shard checks
        self._report_shards_at: float | None = None
        """When a different number of shards at the leader is logged."""

    def is_delivering(self, now: float) -> bool:
        """Return whether the last heartbeats got through."""
        return self._last_sent_at is not None and now - self._last_sent_at < 2 * self._settings.heartbeat + 1.0

    def send(self, ready: Sequence[Child], asking: Child | None, now: float) -> bool:
        """Send the heartbeats of processes, if there are any. `asking` asks the leader whether work waits."""
        if not ready:
            self._last_sent_at = None  # no process was there to send for
            return False
        if self._last_sent_at is not None and now - self._last_sent_at > self._settings.worker_ttl:
            self._pause(ready, now, now - self._last_sent_at)
        self._number += 1
        by_names: dict[str, list[Child]] = {}
        for child in ready:
            by_names.setdefault(names_digest(child.names or []), []).append(child)
        for children in by_names.values():
            beats = [child.heartbeat(self._spec, self._number, self.own, hungry=child is asking) for child in children]
            self._streams.beat(beats, children[0].names or [], self._settings.worker_ttl)
        for parameters in {child.parameters for child in ready} - {b""}:
            if now >= self._publish_at.get(parameters, now):
                self._streams.publish_parameters(parameters)
                self._publish_at[parameters] = now + _REPUBLISH_INTERVAL
        self._last_sent_at = now
        self._log_again_at = 0.0
        self.check_shards(now)
        return True

    def check_shards(self, now: float) -> None:
        """Log once that the leader has another number of shards, if that lasts."""
        if self._has_checked_shards or (leader_shards := self._streams.shards_of_leader()) is None:
            return
        own = self._settings.shards
        if self._report_shards_at is None:
            self._report_shards_at = now + _RESHARD_GRACE
        self._has_checked_shards = leader_shards == own or now >= self._report_shards_at
        if leader_shards != own and self._has_checked_shards:
            message = (
                f"Setting shards is {own}, but {leader_shards} at the leading scheduler, so some shards have no "
                f"workers, or some workers have no tasks. Set ORCHESTRATOR_SHARDS to one number for all processes."
            )
            log.warning("service.misconfigured: %s", message)

    def _pause(self, ready: Sequence[Child], now: float, silence: float) -> None:
        """Order the processes to start no tasks until the leader has said which attempts still count."""
        if now >= self._log_again_at:
            self._log_again_at = now + _LOG_INTERVAL
            log.warning(
                "worker.cut_off seconds=%.1f: no heartbeat got through; the worker asks which of its tasks are still "
                "its own",
                silence,
            )
        for child in ready:
            if not child.doubtful:  # only once: a stalled process would not read it
                child.doubtful = True
                child.send(Command("pause"))
