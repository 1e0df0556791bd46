"""Every Redis key and channel.

Their names begin with the namespace; the table shows the default one. All keys of a shard carry the same hash tag, so
that scripts may use them together in a cluster. Clients listen to all shards at once. These keys are therefore shared
by all shards: changes, watched, spoken, progress, services, payload-stores, pull… and the channel done. In a cluster,
the server of shard 0 holds them (`connect_shared`); channels are everywhere. `G` is the generation: one lifetime of the
Redis data. When data is lost, a new generation begins under new stream names, and no entry of the old one can be
mistaken for a new one.

    {orchestrator:0}:generation         string   the current generation, written by the leader
    {orchestrator:0}:server             string   the run id of the server on which the generation began; on another
                                                 server no process uses its streams
    {orchestrator:0}:database           string   the incarnation of Postgres that the generation belongs to
    {orchestrator:0}:term               string   the leader's term and name; a deposed leader's push is refused
    {orchestrator:0}:applied            string   [generation, cursor]: events up to here are in Postgres
    {orchestrator:0}:claimed            string   [task, attempt] of a commit after `applied`, if one was dispatched
    {orchestrator:0}:canary             string   the leader's test write; holds its number of shards
    {orchestrator:0}:doctor             stream   `orchestrator doctor` tests its permissions with it; deleted at once
    {orchestrator:0}:complaint          string   why the scheduler cannot use Postgres, expires
    {orchestrator:0}:events:G           stream   reports of workers, one entry per flush, read by the leader
    {orchestrator:0}:nudges             stream   "Postgres has new work", or only new ready tasks, capped
    {orchestrator:0}:queue:G:<queue>    stream   dispatch messages, read by the consumer group `workers`
    {orchestrator:0}:queue:G:@<id>      stream   messages for one worker: turns of workflows that it has in memory, and
                                                 tasks that only some workers of the queue know
    {orchestrator:0}:quarantine         stream   messages that could not be decoded or applied, capped
    {orchestrator:0}:workers            set      ids of workers that have or had a heartbeat
    {orchestrator:0}:worker:<id>        string   heartbeat, expires
    {orchestrator:0}:standbys           set      names of standby schedulers, expires
    {orchestrator:0}:standby:<name>     string   one standby scheduler, expires
    {orchestrator:0}:names:<hash>       string   task names that a worker knows, expires
    {orchestrator:0}:parameters:<hash>  string   parameters of the tasks that a worker knows, expires
    {orchestrator:0}:services           hash     service workers over HTTP, by id
    {orchestrator:0}:payload-stores     set      folders that are payload stores in use
    {orchestrator:0}:pull:<execution>   hash     work offered to programs that poll, and its outcome, expires
    {orchestrator:0}:pulls:<service>    zset     executions that wait for a poll, by time
    {orchestrator:0}:orders:<id>        stream   the leader's orders to one worker: stop, drain, go on
    {orchestrator:0}:pages:<run>:<n>    hash     a history too large for the message of attempt n, expires
    {orchestrator:0}:holder:<task>      string   the task that holds the key that a running task wanted for <task>,
                                                 expires
    {orchestrator:0}:progress:<task>    string   the last progress of a task, expires
    {orchestrator:0}:logs               stream   log lines of tasks until the leader has stored them, capped
    {orchestrator:0}:spoken             stream   ids of tasks with new log lines or progress, capped
    {orchestrator:0}:watched            string   present while live events have a listener, expires
    {orchestrator:0}:changes            stream   changes for live events, one entry per tick with a listener, capped
    {orchestrator:0}:pull-offers        channel  services that have new work
    {orchestrator:0}:pull-ends          channel  executions that are completed, or no longer watched
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
"""The fields of a nudge that announces only tasks that are ready to be claimed."""
PRIVATE_TTL = 60
"""Seconds that the private stream of a dead worker is kept, so that the leader can read the rest of it."""
CANARY_TTL = 60
"""Seconds after its last write for which a leader counts as present."""
LOGS_CAP = 2_000
"""The maximum number of unstored log entries; at this number workers send no more."""
KEY_HOLDER_TTL = 60
"""Seconds that the holder of a requested key is published for the running task. The worker asks again before that."""
SPOKEN_CAP = 1_000
"""The maximum length of the stream of tasks that have logged."""
WATCHED_TTL = 30
"""Seconds after a listener's last refresh for which the leader publishes changes."""
JOURNAL_TTL = 3_600
"""Seconds that a task's progress is kept after its last update."""


def private_queue(worker: str) -> str:
    """Return the queue name of one worker's private stream. Names of users' queues have no @."""
    return f"@{worker}"


def worker_of(queue: str) -> str:
    """Return the id of the worker that owns a private stream."""
    return queue[1:]


def is_private(queue: str) -> bool:
    """Return whether a queue name is that of one worker's private stream."""
    return queue.startswith("@")


@dataclass(frozen=True)
class Keys:
    """The key names of one shard, and how messages under these keys are signed."""

    namespace: str = DEFAULT_NAMESPACE
    shard: int = 0
    signing: Signing = OFF
    vault: Vault | None = None
    """Encrypts the progress and log lines of tasks."""
    shards: int = 1

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        return cls(settings.namespace, 0, signing_of(settings), vault_of(settings), settings.shards)

    @cached_property
    def prefix(self) -> str:
        return f"{{{self.namespace}:{self.shard}}}"

    @cached_property
    def common(self) -> str:
        """The prefix of keys that all shards share."""
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
        """Return the channel that announces the end of this task or run."""
        return f"{self.common}:done:{identifier[-1] % DONE_CHANNELS}"

    def types(self, generation: str | None, queues: Iterable[str]) -> dict[str, str]:
        """Return the Redis type of each key that the processes of this shard share.

        Keys shared by all shards are listed for shard 0 only: in a cluster, other shards' servers do not have them.
        """
        strings = (
            *(self.generation, self.server, self.database, self.term, self.applied),
            *(self.canary, self.complaint, self.watched),
        )
        streams = [self.nudges, self.quarantine, self.logs, self.spoken, self.changes]
        if generation:
            streams += [self.events(generation), *(self.queue(generation, queue) for queue in queues)]
        sets = dict.fromkeys((self.workers, self.standbys, self.payload_stores), "set")
        rest = {**sets, self.services: "hash"}
        types = {**dict.fromkeys(strings, "string"), **dict.fromkeys(streams, "stream"), **rest}
        return {key: kind for key, kind in types.items() if key.startswith(self.prefix)}
