"""Clients of the simulation: enqueue, start runs, cancel and retry, each in its own transaction as in the SDK."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from orchestrator.domain.dag.definition import Concurrency, Definition, Param, Step
from orchestrator.domain.flow.definition import DEFAULT, from_plain
from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.states import OPEN_RUN_STATES, OPEN_TASK_STATES
from orchestrator.domain.tasks.retry import RetryPolicy
from orchestrator.domain.tasks.task import NewTask, TaskOptions, UniqueKey
from orchestrator.sdk.backend.sharded import _CHECK_INTERVAL
from orchestrator.store import inbox, shards
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import creation
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import enqueue, results, unique
from orchestrator.transport.connection import UNAVAILABLE
from tests.chaos.simulator.limits import KEYS, LIMITED, STORED
from tests.chaos.simulator.memory import Caller
from tests.unit.flows.made import PARAMS, make_flow

if TYPE_CHECKING:
    from tests.chaos.simulator.plan import Action
    from tests.chaos.simulator.world import World

RETRYING = msgspec.json.encode(TaskOptions(retry=RetryPolicy(max=2, base=0.3, jitter=0.0))).decode()

DAG = Definition(
    name="simulated",
    params={"items": Param(type="list"), "fails": Param(type="number")},
    steps=(
        Step(name="list", task="list", input={"items": "${params.items}"}),
        Step(
            name="each",
            task="job",
            depends_on=("list",),
            foreach="list",
            concurrency=2,
            retries=1,
            input={"fails": "${params.fails}", "seconds": 0.2},
        ),
        Step(name="beside", task="job", depends_on=("list",), input={"seconds": 0.5, "fails": "${params.fails}"}),
        Step(name="gather", task="job", depends_on=("each", "beside")),
        Step(name="always", task="job", depends_on=("each", "beside"), trigger="all_ended"),
    ),
)

_SOME = "${len(source) > 1 and source[1] != 'nobody'}"
WIDE = Definition(
    name="wide",
    params={"fails": Param(type="number")},
    steps=(
        *(Step(name=f"beside {n}", task="job", input={"seconds": 0.02, "fails": "${params.fails}"}) for n in range(20)),
        Step(name="source", task="job", input={"seconds": 0.05}),
        *(
            Step(name=f"below {n}", task="job", depends_on=("source",), when=_SOME, input={"seconds": 0.02})
            for n in range(12)
        ),
        Step(name="end", task="job", depends_on=tuple(f"below {n}" for n in range(12)), trigger="all_ended"),
    ),
)
"""A workflow with more steps than fit into one tick with a small batch, at the start and below `source`."""
SCARCE = Definition(
    name="scarce",
    concurrency=Concurrency(limit=2),
    steps=(Step(name="only", task="job", input={"seconds": 0.4}),),
)
"""A workflow that limits its open runs."""


_TASK_ACTIONS = ("task", "flaky", "long", "parent", "poison")
"""Actions that create plain tasks only."""


class Clients:
    """All client programs together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.plan.seed} clients")
        self.tasks: list[bytes] = []
        """Every task that was enqueued alone or in a run of many."""
        self.runs: list[bytes] = []
        self.flows: dict[bytes, dict[str, Any]] = {}
        """The definitions of flows, by run."""
        self.requested: set[tuple[RequestKind, bytes]] = set()
        """Every request, with the task or run it applies to."""
        self.known_shards = world.plan.shards
        """Number of shards in the clients' settings."""
        self._width, self._recheck_at, self._used = world.plan.shards, 0.0, {0}
        with world.database.engine_of(0).begin() as connection:
            self._versions = {
                definition.name: workflows.apply(connection, definition).version for definition in (DAG, WIDE, SCARCE)
            }

    def act(self, action: Action) -> None:
        """Perform an action, and nudge the leader."""
        self._world.set_clocks()
        self._used = set()
        getattr(self, f"_{action.kind.replace(' ', '_')}")(action.size)
        for shard in sorted(self._used or {0}):
            self.nudge(shard, "task" if action.kind in _TASK_ACTIONS else "")

    def nudge(self, shard: int = 0, kind: str = "") -> None:
        """Notify the leader of new work, if Redis is available."""
        redis = self._world.redis[shard]
        try:
            redis.call(Caller("client"), "nudge", lambda: redis.nudge(kind))
        except UNAVAILABLE:
            self._world.trace("the nudge is lost")

    def _id(self) -> bytes:
        return time_ordered_id(int(1.9e12 + self._world.now * 1000), self._random.randbytes(10))

    def _new_shard(self, value: bytes) -> int:
        """Return the shard of a new row as `ShardedBackend` does: never a shard known to be closing."""
        if self.known_shards > 1 and self._world.now >= self._recheck_at:
            seen = shards.list_shards(self._world.database.connection_of(0))
            self._width = max(1, min(self.known_shards, [shard.is_closing for shard in seen].count(False)))
            self._recheck_at = self._world.now + _CHECK_INTERVAL
        shard = crc32(value) % min(self._width, self.known_shards)
        self._used.add(shard)
        return shard

    def _shard_of(self, value: bytes) -> int:
        """Return the shard that contains a row."""
        shard = self._world.database.locate([value]).get(value, 0)
        self._used.add(shard)
        return shard

    # -- tasks

    def _enqueue(self, name: str = "job", options: str | None = None, **arguments: Any) -> None:
        task = NewTask(self._id(), name, "default", msgspec.msgpack.encode(((), arguments)), options=options)
        enqueue.insert_task(self._world.database.connection_of(self._new_shard(task.id)), task)
        self.tasks.append(task.id)

    def _task(self, size: int) -> None:
        for _ in range(size):
            self._enqueue(seconds=self._random.choice((0.02, 0.3, 1.5, 3.0)), fails=0.1)

    def _flaky(self, size: int) -> None:
        for number in range(size):
            self._enqueue("exact" if number % 2 else "job", seconds=0.2, fails=0.5, options=RETRYING)

    def _long(self, size: int) -> None:
        del size
        self._enqueue(seconds=self._random.uniform(4.0, 7.0))

    def _parent(self, size: int) -> None:
        for _ in range(min(size, 2)):
            self._enqueue("parent", seconds=0.2)

    def _poison(self, size: int) -> None:
        del size
        self._enqueue("poison")

    def _limited(self, size: int) -> None:
        """Enqueue tasks whose limits span all shards, each in a random shard, as running tasks do."""
        for _ in range(size):
            name = self._random.choice(("narrow", "keyed", "rated", "queued"))
            seconds = self._random.choice((0.05, 0.3, 1.0))
            lane = f"{name}|{self._random.choice(KEYS)}" if name == "keyed" else f"{name}|"
            task = NewTask(
                self._id(),
                name,
                LIMITED if name == "queued" else "default",
                msgspec.msgpack.encode(((), {"seconds": seconds, "fails": 0.1})),
                options=STORED.get(name),
                lane=lane if name in STORED else None,
            )
            enqueue.insert_task(self._world.database.connection_of(self._new_shard(task.id)), task)
            self.tasks.append(task.id)

    def _unique(self, size: int) -> None:
        for _ in range(size):
            key = UniqueKey(self._random.choice(KEYS), "running")
            payload = msgspec.msgpack.encode(((), {"seconds": self._random.choice((0.05, 0.5)), "fails": 0.4}))
            task = NewTask(self._id(), "unique", "default", payload, options=STORED["unique"], unique=key)
            holder = unique.holder(self._world.database.connection_of(0), key.key)
            shard = self._shard_of(holder) if holder else self._new_shard(key.key.encode())
            self.tasks.append(unique.insert_unique(self._world.database.connection_of(shard), task, key))

    def _claimant(self, size: int) -> None:
        """Enqueue tasks that enqueue further tasks with unique keys."""
        for _ in range(size):
            self._enqueue("claimant", seconds=0.1, key=self._random.choice(KEYS))

    # -- runs

    def _flow(self, size: int) -> None:
        """Publish a new random flow, and start a run of it."""
        del size
        random = Random(f"{self._world.plan.seed} flow {len(self.flows)}")
        plain = make_flow(random.choice, max_steps=6, exec_type="local_func")
        name = f"flow-{self._world.plan.seed}-{len(self.flows)}"
        identifier = time_ordered_id(int(1.9e12 + self._world.now * 1000), random.randbytes(10))
        with self._world.database.engine_of(self._new_shard(identifier)).begin() as connection:
            version = flow_runs.publish(connection, name, from_plain(plain), DEFAULT).version
            creation.create(connection, [flow_runs.new_run(name, version, identifier, PARAMS)])
        self.flows[identifier] = plain
        self.runs.append(identifier)

    def _many(self, size: int) -> None:
        run = self._id()
        tasks = [
            NewTask(
                self._id(),
                "job",
                "default",
                msgspec.msgpack.encode(((), {"seconds": self._random.choice((0.1, 1.0)), "fails": 0.15})),
                run_id=run,
                position=position,
            )
            for position in range(2 * size)
        ]
        with self._world.database.engine_of(self._new_shard(run)).begin() as connection:
            creation.create(connection, [NewRun(run, "many", enqueue.copy_tasks(connection, tasks))])
        self.tasks.extend(task.id for task in tasks)
        self.runs.append(run)

    def _dag(self, size: int) -> None:
        self._start(DAG, self._id(), {"items": list(range(size - 1)), "fails": self._random.choice((0.0, 0.3))})

    def _scarce(self, size: int) -> None:
        for _ in range(size):
            self._start(SCARCE, self._id(), {})

    def _wide(self, size: int) -> None:
        del size
        random = Random(f"{self._world.plan.seed} wide {len(self.runs)}")
        identifier = time_ordered_id(int(1.9e12 + self._world.now * 1000), random.randbytes(10))
        self._start(WIDE, identifier, {"fails": random.choice((0.0, 0.1))})

    def _start(self, definition: Definition, identifier: bytes, params: dict[str, Any]) -> None:
        run = dags.new_run(definition, self._versions[definition.name], identifier, params)
        creation.create(self._world.database.connection_of(self._new_shard(run.id)), [run])
        self.runs.append(run.id)

    # -- requests

    def _request(self, kind: RequestKind, targets: list[bytes], states: tuple[str, ...]) -> None:
        if not targets:
            return
        target = self._random.choice(targets)
        connection = self._world.database.connection_of(self._shard_of(target))
        if kind in (RequestKind.CANCEL_TASK, RequestKind.RETRY_TASK):
            outcome = results.outcomes(connection, [target]).get(target)
            state = outcome.status if outcome is not None else "unknown"
        else:
            progress = results.progress(connection, target)
            state = progress[0] if progress is not None else "unknown"
        if state in states or self._random.random() < 0.2:  # sometimes the state has changed since it was read
            inbox.add(connection, kind, target)
            self.requested.add((kind, target))
            self._world.trace(f"client: asks to {kind} {target.hex()[-6:]}, now {state}")

    def _cancel_task(self, size: int) -> None:
        del size
        self._request(RequestKind.CANCEL_TASK, self.tasks, OPEN_TASK_STATES)

    def _retry_task(self, size: int) -> None:
        del size
        self._request(RequestKind.RETRY_TASK, self._failed("ended_tasks"), ("failed", "skipped"))

    def _cancel_run(self, size: int) -> None:
        del size
        self._request(RequestKind.CANCEL_RUN, self.runs, OPEN_RUN_STATES)

    def _retry_run(self, size: int) -> None:
        del size
        self._request(RequestKind.RETRY_RUN, self._failed("runs"), ("failed",))

    def retry_all(self, runs: list[bytes]) -> None:
        """Request retries of stuck runs."""
        for run in runs:
            inbox.add(self._world.database.connection_of(self._shard_of(run)), RequestKind.RETRY_RUN, run)

    def _failed(self, table: str) -> list[bytes]:
        rows = self._world.database.sql(f"SELECT id FROM orchestrator.{table} WHERE status = 'failed' ORDER BY id")
        return [row["id"].bytes for row in rows]
