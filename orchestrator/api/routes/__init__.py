"""Every route, by subject."""

from __future__ import annotations

from orchestrator.api.endpoints import Endpoint
from orchestrator.api.routes import (
    bulk,
    client,
    code,
    enqueueing,
    flow_seed,
    flows,
    live,
    pull,
    queues,
    registry,
    runs,
    schedules,
    seed,
    system,
    tasks,
    workflows,
)

ROUTES: tuple[Endpoint, ...] = (
    *enqueueing.routes,
    *tasks.routes,
    *bulk.routes,
    *queues.routes,
    *workflows.routes,
    *runs.routes,
    *code.routes,
    *code.approval_routes,
    *schedules.routes,
    *queues.worker_routes,
    *system.routes,
    *live.routes,
    *system.quarantine_routes,
    *system.audit_routes,
    *client.routes,
    *seed.routes,
    *flows.routes,
    *flow_seed.routes,
    *registry.routes,
    *pull.routes,
)
