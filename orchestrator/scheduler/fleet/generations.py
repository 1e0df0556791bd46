"""Generations: the lifetimes of the streams in Redis.

Redis may restart without its data, or with old data. The leader notices when the server has restarted or no longer
knows the position up to which events were applied. It then begins a new generation, with new names of streams, and
workers resend every unconfirmed report. Until then no process uses the old streams on such a server
(`transport/connection.py`): entry ids show which events were applied, and mean nothing across a restart.

Postgres may lose its last commits too: a backup was restored, or a standby took over that had not received them. Redis
then knows more than Postgres, and workers hold attempts that Postgres does not know. A new generation begins, and
attempts are numbered from far above, so that no old attempt is mistaken for a new one. The generation's name carries
the reason, and workers resend recently applied reports (`workers/reporting/kept.py`).
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

_FENCE_STEP = 1_000_000
"""Attempt numbers to skip, at least, when the used ones are unknown: far more than any task has had. The number is
random because the same backup may be restored twice."""


class Generations:
    """The generation of this term: the position up to which events are applied, and the position confirmed to workers.

    `apply` commits the events of a read together with the cursor behind them, and returns what ended.
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
        self._is_tidy = False
        self._has_lost_commits = False
        self.cursor = leadership.cursor() or Cursor("", "0-0", "")
        self.confirmed = "0-0"
        self.is_rewound = False
        """The generation began because Postgres had lost commits."""

    def claim_term(self, monotonic: float) -> None:
        """Make Redis accept writes of this term. Postgres issues terms; a later one in Redis may be foreign."""
        term, database = self._leadership.term, self._leadership.identity()
        try:
            is_new = self._streams.terms.claim(term, database)
        except Deposed:
            with self._leadership.writing(monotonic):  # raises TermOver if Postgres has a later term
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
        """Begin a new generation if Redis has lost data since the last check. Return whether one began."""
        cursor = self.cursor
        state = self._streams.terms.state(cursor.generation, cursor.position)
        if cursor.generation and (state.is_ahead(cursor.generation, cursor.position) or not self._has(state)):
            self.postgres_has_lost_commits()
        same = state.generation == cursor.generation and state.server == cursor.server
        if same and not self._has_lost_commits and state.usable and state.reached(self.confirmed):
            if cursor.position != "0-0" and state.applied != Applied(cursor.generation, cursor.position):
                # Workers lack the confirmation: a crash or an outage came between it and the commit.
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
        """Make the next check begin a generation that reuses no attempt number."""
        self._has_lost_commits = bool(self.cursor.generation)  # otherwise the database is new, and has nothing to lose

    def _has(self, state: ServerState) -> bool:
        """Return whether a restored or replaced Postgres has the last commit that Redis knows, and so all earlier ones.

        The applied position has been compared before; this concerns a commit that only claimed tasks.
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
        """Make the next check begin a new generation."""
        self.cursor = self.cursor._replace(server="")

    def _begin(self, server: str, monotonic: float, *, is_whole: bool) -> None:
        self._streams.fleet.write_canary()  # raises if Redis refuses writes
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
                self._leadership.raise_fence(writing, _FENCE_STEP + secrets.randbelow(_FENCE_STEP))
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
        self._is_tidy = False
        self._streams.terms.begin(self._leadership.term, generation, server)
        self._remove_old_streams()

    def _remove_old_streams(self) -> None:
        """Remove the streams of earlier generations, once, in case the leader that began this one did not."""
        if not self._is_tidy:
            self._streams.terms.remove_older(self.cursor.generation, later=self.is_rewound)
            self._is_tidy = True

    def _drain(self, generation: str) -> None:
        """Apply the events left in the old generation's stream: their workers may be gone, and unable to resend them.

        After lost commits, the cursor stays unchanged until the next generation, so that another leader notices.
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
            # Some entries may have been lost with the old server, and other reports may have their ids. So nothing is
            # confirmed here: workers resend those reports, which are then ignored.
            self._streams.publish_ended(ended)
