"""The runs of workflows as code that schedules start."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.ids import time_ordered_id, to_text
from orchestrator.domain.schedules.schedule import Schedule, fire_key
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.sealing import CALL, Vault
from orchestrator.store.code.runs import new_run
from orchestrator.store.runs.creation import NewRun


def run_of(
    workflow: str,
    target: CodeTarget,
    schedule: Schedule,
    fire: datetime,
    run: bytes,
    key: str,
    vault: Vault | None = None,
) -> NewRun:
    """Return the run of one fire; the parameters of the schedule are its arguments, by name."""
    fire_time = fire.astimezone(UTC).isoformat()
    info = {"id": to_text(run), "workflow": workflow, "version": target.version, "fire_time": fire_time}
    given = parse_template(schedule.params).render({"run": info})
    payload = msgspec.msgpack.encode(((), given))
    payload = payload if vault is None else vault.seal(CALL, payload)
    started = history.RunStarted(workflow, target.version, payload, target.queue)
    return new_run(run, [started])._replace(timeout=target.timeout, schedule=key, fire_time=fire_time)


def run_id(key: str, fire: datetime) -> bytes:
    """Return the id of the run of a fire: always the same, so that there is one, whatever the clock does."""
    digest = hashlib.blake2b(fire_key(key, fire).encode(), digest_size=10).digest()
    return time_ordered_id(int(fire.timestamp() * 1000), digest)
