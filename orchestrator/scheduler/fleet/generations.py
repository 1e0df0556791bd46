"""Generations: how long the streams of one Redis server can be trusted.

Redis may restart without its data, or with old data. The leader notices: the server has restarted, or it no longer
remembers how far events were applied. Then a new generation begins, under new names, and workers send again what the
leader has not confirmed. Until then no process reads or writes the old streams on such a server
(`transport/connection.py`): ids of entries are compared, to know what was applied, and mean nothing across a
restart.

Postgres, too, may come back without its last commits: a backup was restored, or a standby took over that had not
received them. Then Redis remembers more than Postgres, and workers hold attempts that Postgres does not know. A new
generation begins, and attempts are numbered from far above, so that no old attempt is taken for a new one. Its name
says why it began, and workers send again what was applied lately (`workers/reporting/kept.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from orchestrator.domain.fleet.generation import name, rewind_of
from orchestrator.scheduler.leadership import Leadership
from orchestrator.store.leases import Cursor
from orchestrator.store.tasks import waiting
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Applied, Ended
from orchestrator.transport.leader.streams import Inbound, LeaderStreams
from orchestrator.transport.leader.terms import Deposed, ServerState

log = get_logger("scheduler")

_LEAP = 1_000_000
"""Numbers of attempts to skip, at least, when it is unknown which were used: far more than any task has had. It is
random, for the same backup may be restored twice."""


class Generations:
    """The generation of this term: how far its events are applied, and how far that is confirmed to workers.

    `apply` commits what a read brought, with the cursor behind it, and returns what ended.
    """

    def __init__(
        self,
        streams: LeaderStreams,
        leadership: Leadership,
        batch: int,
        apply: Callable[[Inbound, Cursor], Sequence[Ended]],
    ) -> None:
        self._streams = streams
        self._leadership = leadership
        self._batch = batch
        self._apply = apply
        self._serial = 0
        self._tidy = False
        self._has_lost_commits = False
        self.cursor = leadership.cursor() or Cursor("", "0-0", "")
        self.confirmed = "0-0"
        self.is_rewound = False
        """The generation began because Postgres had lost commits."""

    def claim_term(self, monotonic: float) -> None:
        """Have pushes of this term accepted. Terms come from Postgres; a later one in Redis may be none of its own."""
        term, database = self._leadership.term, self._leadership.identity()
        try:
            is_new = self._streams.terms.claim(term, database)
        except Deposed:
            with self._leadership.writing(monotonic):  # which says so if there is a later term
                log.error(
                    "redis.foreign_term term=%d: Redis holds a later term, which Postgres never issued. The database "
                    "is new or restored, or another system uses this Redis. Give each system its own Redis database.",
                    term,
                )
            self._streams.terms.claim(term, database, overrule=True)
            is_new = False
        if not is_new:
            self.postgres_has_lost_commits()

    def keep(self, monotonic: float) -> bool:
        """Begin a new generation if Redis has lost anything since the last look; say whether one has begun."""
        cursor = self.cursor
        state = self._streams.terms.state(cursor.generation, cursor.position)
        if cursor.generation and (state.is_ahead(cursor.generation, cursor.position) or not self._has(state)):
            self.postgres_has_lost_commits()
        same = state.generation == cursor.generation and state.server == cursor.server
        if same and not self._has_lost_commits and state.usable and state.reached(self.confirmed):
            if cursor.position != "0-0" and state.applied != Applied(cursor.generation, cursor.position):
                # Workers have no confirmation: a crash or an outage came between the commit and it.
                self._streams.publish(cursor.generation, self._leadership.term, {}, cursor.position)
                self.confirmed = cursor.position
            self._remove_old_streams()
            return False
        if cursor.generation and state.generation == cursor.generation and state.readable:
            self._drain(cursor.generation)
        is_whole = state.usable and state.applied == Applied(cursor.generation, cursor.position)
        self._begin(state.server, monotonic, is_whole=is_whole)
        return True

    def postgres_has_lost_commits(self) -> None:
        """Have the next look begin another generation, in which no number of an attempt is used again."""
        self._has_lost_commits = bool(self.cursor.generation)  # else it is a new database, and has nothing to lose

    def _has(self, state: ServerState) -> bool:
        """Say whether another life of Postgres has the last commit that Redis shows, and so all before it.

        Events that were applied further have been looked for by now; here it is about a commit that only claimed tasks.
        """
        if state.same_database:
            return True
        if state.claimed is not None and not self._leadership.has_claimed(state.claimed.id, state.claimed.attempt):
            return False
        if state.generation is not None:
            log.info("postgres.changed: it is another server or was restored, and has every commit that Redis knows of")
            self._streams.terms.accept_database()
        return True

    def give_up(self) -> None:
        """Have the next look begin another generation, under other names."""
        self.cursor = self.cursor._replace(server="")

    def _begin(self, server: str, monotonic: float, *, is_whole: bool) -> None:
        self._streams.fleet.write_canary()  # no use to begin anything where nothing can be written
        self._serial += 1
        is_first, rewound = not self.cursor.generation, self._has_lost_commits
        token = secrets.token_hex(4)
        rewind = token if rewound else rewind_of(self.cursor.generation)
        generation = name(self._leadership.term, self._serial, token, rewind)
        self.cursor = Cursor(generation, "0-0", server)
        self.confirmed = "0-0"
        with self._leadership.writing(monotonic) as writing:
            writing.cursor = self.cursor
            affected = 0 if is_whole else len(waiting.in_flight(writing.connection))
            if rewound:
                self._leadership.raise_fence(writing, _LEAP + secrets.randbelow(_LEAP))
        if rewound:
            log.error(
                "postgres.commits_lost generation=%s: Redis knows of commits that Postgres does not have. A backup was "
                "restored, or a standby took over that had not received them. Tasks that ran since then may run again.",
                generation,
            )
        elif affected and not is_first:
            log.warning(
                "redis.data_lost generation=%s tasks_in_flight=%d: Redis restarted, or lost or damaged data",
                generation,
                affected,
            )
        else:
            log.info("redis.generation_began generation=%s%s", generation, "" if is_first else ": Redis restarted")
        self._has_lost_commits = False
        self.is_rewound = rewound
        self._tidy = False
        self._streams.terms.begin(self._leadership.term, generation, server)
        self._remove_old_streams()

    def _remove_old_streams(self) -> None:
        """Remove what earlier generations left, once: the leader that began this one may not have done it."""
        if not self._tidy:
            self._streams.terms.remove_older(self.cursor.generation, later=self.is_rewound)
            self._tidy = True

    def _drain(self, generation: str) -> None:
        """Apply what still stands in the old generation's stream; its workers may be gone and cannot send it again.

        After commits were lost, the cursor stays where it is until the next generation begins: that Redis is ahead of
        it is how another leader would notice.
        """
        position = self.cursor.position
        while True:
            inbound = self._streams.leftover(generation, position, self._batch)
            if not inbound.entries:
                return
            position = inbound.entries[-1][0]
            cursor = self.cursor if self._has_lost_commits else self.cursor._replace(position=position)
            ended = self._apply(inbound, cursor)
            self.cursor = cursor
            # Some entries may have been lost with the old server, and other reports may stand in their place: nobody
            # is told that those are applied. They are sent again, and ignored.
            self._streams.publish_ended(ended)
