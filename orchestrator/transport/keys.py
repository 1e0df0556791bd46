"""Every Redis key and channel, written once.

They begin with the namespace; below it is the default one. All keys of a shard carry the same hash tag, so that
scripts may use them together in a cluster. Clients listen to all shards at once: done, changes, watched, spoken,
progress, services, payload-stores and pull… are the same keys for each of them. In a cluster, those keys are with shard
0 (`connect_shared`); channels are everywhere.
`G` is the generation: a name for one life of the Redis data. When data is lost, a new generation begins
under new stream names, and nothing that belonged to the old one can be mistaken for the new.

    {orchestrator:0}:generation         string   the current generation, written by the leader
    {orchestrator:0}:server             string   the run id of the server on which that generation began; where it is
                                                 another's, nobody uses its streams
    {orchestrator:0}:database           string   which life of Postgres the generation belongs to
    {orchestrator:0}:term               string   the leader's term and name; a deposed leader's push is refused
    {orchestrator:0}:applied            string   [generation, cursor]: events up to here are in Postgres
    {orchestrator:0}:claimed            string   [task, attempt] of a later commit than `applied`, if any was handed out
    {orchestrator:0}:canary             string   written by the leader to learn whether Redis takes writes; says how
                                                 many shards it knows
    {orchestrator:0}:doctor             stream   with which `orchestrator doctor` tries its rights; deleted at once
    {orchestrator:0}:complaint          string   why the scheduler cannot use Postgres, expires
    {orchestrator:0}:events:G           stream   reports of workers, one entry per flush, read by the leader
    {orchestrator:0}:nudges             stream   "something is new in Postgres", or only ready tasks, capped
    {orchestrator:0}:queue:G:<queue>    stream   dispatch messages, read by the consumer group `workers`
    {orchestrator:0}:queue:G:@<id>      stream   for one worker: turns of workflows that it has in memory, and what
                                                 only some workers of a queue know
    {orchestrator:0}:quarantine         stream   messages that could not be understood or applied, capped
    {orchestrator:0}:workers            set      ids of workers that have a heartbeat, or had one
    {orchestrator:0}:worker:<id>        string   heartbeat, expires
    {orchestrator:0}:standbys           set      names of schedulers that stand by, expires
    {orchestrator:0}:standby:<name>     string   one of them, expires
    {orchestrator:0}:names:<hash>       string   task names that a worker knows, expires
    {orchestrator:0}:parameters:<hash>  string   parameters of the tasks that a worker knows, expires
    {orchestrator:0}:services           hash     who offers services over HTTP, by id
    {orchestrator:0}:payload-stores     set      folders that are payload stores in use
    {orchestrator:0}:pull:<execution>   hash     work that is offered to who asks for it, and what became of it, expires
    {orchestrator:0}:pulls:<service>    zset     what of that waits for somebody, by time
    {orchestrator:0}:orders:<id>        stream   the leader's orders to one worker: stop, drain, go on
    {orchestrator:0}:pages:<run>:<n>    hash     a history that is too large for the message of attempt n, expires
    {orchestrator:0}:holder:<task>      string   which task has the key that a running task wanted this one for, expires
    {orchestrator:0}:progress:<task>    string   how far a task says it has come, expires
    {orchestrator:0}:logs               stream   what tasks said, until the leader has stored it, capped
    {orchestrator:0}:spoken             stream   which tasks have said something, capped
    {orchestrator:0}:watched            string   somebody listens to what moves, expires
    {orchestrator:0}:changes            stream   what moved, one entry per tick while somebody listens, capped
    {orchestrator:0}:pull-offers        channel  services for which there is work
    {orchestrator:0}:pull-ends          channel  executions that are done, or that nobody asks for any more
    {orchestrator:0}:done:<0..15>       channel  tasks and runs that ended, once per tick, by hash of the id
    {orchestrator:0}:applied            channel  the same as the key, once per tick
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from orchestrator.sealing import Vault, vault_of
from orchestrator.settings import DEFAULT_NAMESPACE, Settings
from orchestrator.transport.signing import OFF, Signing, signing_of

GROUP = "workers"
DONE_CHANNELS = 16
NUDGE_CAP = 100
READY_TASK = [b"task", b""]
"""The fields of a nudge that is about tasks that can be claimed at once, and about nothing else."""
PRIVATE_TTL = 60
"""Seconds for which the own stream of a worker that is gone still stands, for the leader to see what is in it."""
CANARY_TTL = 60
"""Seconds after its last word for which one can see when a leader was there."""
LOGS_CAP = 2_000
"""Unstored log entries from which on no more are taken."""
KEY_HOLDER_TTL = 60
"""Seconds for which a running task can read which task has the key that it wanted; it asks again before."""
SPOKEN_CAP = 1_000
"""Entries that are kept of tasks that have logged."""
WATCHED_TTL = 30
"""Seconds after the last sign of a listener for which the leader publishes changes."""
JOURNAL_TTL = 3_600
"""Seconds that a task's progress is kept after the last word."""


def private_queue(worker: str) -> str:
    """Return the name under which one worker's own stream stands among the queues; no queue of people has an @."""
    return f"@{worker}"


def worker_of(queue: str) -> str:
    """Return the worker whose own stream this is."""
    return queue[1:]


def is_private(queue: str) -> bool:
    """Say whether this is one worker's own stream."""
    return queue.startswith("@")


@dataclass(frozen=True)
class Keys:
    """The names of one shard's keys, and how what stands there is signed."""

    namespace: str = DEFAULT_NAMESPACE
    shard: int = 0
    signing: Signing = OFF
    vault: Vault | None = None
    """Seals progress and log lines of tasks."""
    shards: int = 1

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        return cls(settings.namespace, 0, signing_of(settings), vault_of(settings), settings.shards)

    @cached_property
    def prefix(self) -> str:
        return f"{{{self.namespace}:{self.shard}}}"

    @cached_property
    def common(self) -> str:
        """The prefix of keys that all shards use."""
        return f"{{{self.namespace.partition('/')[0]}:{self.shard}}}"

    @cached_property
    def generation(self) -> str:
        return f"{self.prefix}:generation"

    @cached_property
    def server(self) -> str:
        return f"{self.prefix}:server"

    @cached_property
    def database(self) -> str:
        return f"{self.prefix}:database"

    @cached_property
    def term(self) -> str:
        return f"{self.prefix}:term"

    @cached_property
    def applied(self) -> str:
        return f"{self.prefix}:applied"

    @cached_property
    def claimed(self) -> str:
        return f"{self.prefix}:claimed"

    @cached_property
    def canary(self) -> str:
        return f"{self.prefix}:canary"

    @cached_property
    def doctor(self) -> str:
        return f"{self.prefix}:doctor"

    @cached_property
    def complaint(self) -> str:
        return f"{self.prefix}:complaint"

    @cached_property
    def nudges(self) -> str:
        return f"{self.prefix}:nudges"

    @cached_property
    def quarantine(self) -> str:
        return f"{self.prefix}:quarantine"

    @cached_property
    def logs(self) -> str:
        return f"{self.prefix}:logs"

    @cached_property
    def spoken(self) -> str:
        return f"{self.common}:spoken"

    @cached_property
    def watched(self) -> str:
        return f"{self.common}:watched"

    @cached_property
    def changes(self) -> str:
        return f"{self.common}:changes"

    @cached_property
    def workers(self) -> str:
        return f"{self.prefix}:workers"

    @cached_property
    def standbys(self) -> str:
        return f"{self.prefix}:standbys"

    @cached_property
    def services(self) -> str:
        return f"{self.common}:services"

    @cached_property
    def payload_stores(self) -> str:
        return f"{self.common}:payload-stores"

    @cached_property
    def pull_offers(self) -> str:
        return f"{self.common}:pull-offers"

    @cached_property
    def pull_ends(self) -> str:
        return f"{self.common}:pull-ends"

    def pull(self, execution: str) -> str:
        return f"{self.common}:pull:{execution}"

    def pull_waiting(self, service: str) -> str:
        return f"{self.common}:pulls:{service}"

    def events(self, generation: str) -> str:
        return f"{self.prefix}:events:{generation}"

    def queue(self, generation: str, queue: str) -> str:
        return f"{self.prefix}:queue:{generation}:{queue}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}:worker:{worker}"

    def standby(self, name: str) -> str:
        return f"{self.prefix}:standby:{name}"

    def names(self, digest: str) -> str:
        return f"{self.prefix}:names:{digest}"

    def parameters(self, digest: str) -> str:
        return f"{self.prefix}:parameters:{digest}"

    def orders(self, worker: str) -> str:
        return f"{self.prefix}:orders:{worker}"

    def pages(self, run: bytes, attempt: int) -> str:
        return f"{self.prefix}:pages:{run.hex()}:{attempt}"

    def key_holder(self, task: bytes) -> str:
        return f"{self.prefix}:holder:{task.hex()}"

    def progress(self, task: bytes) -> str:
        return f"{self.common}:progress:{task.hex()}"

    def done(self, identifier: bytes) -> str:
        """Return the channel on which the end of this task or run is announced."""
        return f"{self.common}:done:{identifier[-1] % DONE_CHANNELS}"

    def types(self, generation: str | None, queues: Iterable[str]) -> dict[str, str]:
        """Return the type that Redis should show for each key of processes of this shard together.

        What all shards share is with the first one: in a cluster, another one's server does not have it.
        """
        strings = (
            *(self.generation, self.server, self.database, self.term, self.applied),
            *(self.canary, self.complaint, self.watched),
        )
        streams = [self.nudges, self.quarantine, self.logs, self.spoken, self.changes]
        if generation:
            streams += [self.events(generation), *(self.queue(generation, queue) for queue in queues)]
        sets = dict.fromkeys((self.workers, self.standbys, self.payload_stores), "set")
        others = {**sets, self.services: "hash"}
        found = {**dict.fromkeys(strings, "string"), **dict.fromkeys(streams, "stream"), **others}
        return {key: kind for key, kind in found.items() if key.startswith(self.prefix)}
