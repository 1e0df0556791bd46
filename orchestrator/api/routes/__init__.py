"""Every route, by subject."""

from __future__ import annotations

from orchestrator.api.endpoints import Endpoint
from orchestrator.api.routes import (
    approvals,
    audit,
    bulk,
    client,
    code,
    enqueueing,
    fleet,
    flow_seed,
    flows,
    live,
    pull,
    quarantine,
    queues,
    registry,
    runs,
    schedules,
    seed,
    system,
    tasks,
    workflows,
)

_WORK = (enqueueing, tasks, bulk, queues, workflows, runs, code, approvals, schedules, fleet)
_SYSTEM = (system, live, quarantine, audit, client, seed, flows, flow_seed, registry, pull)
ROUTES: tuple[Endpoint, ...] = tuple(route for subject in (*_WORK, *_SYSTEM) for route in subject.routes)
