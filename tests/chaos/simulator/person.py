"""A person who sends signals to waiting flows, after a delay and sometimes twice."""

from __future__ import annotations

import base64
from random import Random
from typing import TYPE_CHECKING

from orchestrator.domain import timezones
from orchestrator.domain.flow.state import FlowState, Wait
from orchestrator.domain.plain import stored_json
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from tests.unit.flows.made import SIGNALS

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

_OPEN = "SELECT id, state FROM orchestrator.runs WHERE flow AND ended_at IS NULL ORDER BY id"


class Person:
    """Checks the open runs at intervals."""

    PAUSE = 0.3

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.plan.seed} person")

    def turn(self) -> None:
        """Send signals to some waiting runs, and unexpected signals to others."""
        self._world.set_clocks()
        for row in self._world.database.sql(_OPEN) if self._world.clients.flows else ():
            state = FlowState() if row["state"] is None else FlowState.from_plain(timezones.decode(bytes(row["state"])))
            work = state.work
            key = work.key.rpartition("/")[2] if isinstance(work, Wait) else ""
            if key in SIGNALS and self._random.random() < 0.7:
                for _ in range(self._random.choice((1, 1, 1, 2))):
                    self._send(row["id"].bytes, key)
            elif self._random.random() < 0.1:
                self._send(row["id"].bytes, self._random.choice(sorted(SIGNALS)))

    def _send(self, run: bytes, key: str) -> None:
        value = base64.b64encode(timezones.encode([SIGNALS[key], "person", ""])).decode()
        shard = self._world.database.locate([run]).get(run, 0)
        body = stored_json({"key": key, "value": value})
        inbox.add(self._world.database.connection_of(shard), RequestKind.FLOW_SIGNAL, run, body)
        self._world.clients.nudge(shard)
        self._world.trace(f"person: sends {key} to {run.hex()[-6:]}")
