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
    task_values,
    tasks,
    workflows,
)

ROUTES: tuple[Endpoint, ...] = (
    *enqueueing.routes,
    *tasks.routes,
    *bulk.routes,
    *task_values.routes,
    *queues.routes,
    *workflows.routes,
    *runs.routes,
    *code.routes,
    *approvals.routes,
    *schedules.routes,
    *fleet.routes,
    *system.routes,
    *live.routes,
    *quarantine.routes,
    *audit.routes,
    *client.routes,
    *seed.routes,
    *flows.routes,
    *flow_seed.routes,
    *registry.routes,
    *pull.routes,
)
