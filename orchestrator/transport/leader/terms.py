"""The leader's term and the generation, as Redis remembers them."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from redis import Redis

from orchestrator.domain.fleet.generation import age, is_over
from orchestrator.transport.codec import Applied, Attempt, decode_or_none, stream_position
from orchestrator.transport.connection import Argument
from orchestrator.transport.keys import Keys

# The key holds the term and the name of the process that claimed it, because a Postgres that lost commits issues a term
# twice. A value that is no string, or does not begin with a number, was not written by a leader: the script ignores it,
# and SET replaces it.
_HELD_TERM = """
local mark = redis.pcall('GET', KEYS[1])
mark = type(mark) == 'string' and mark or ''
local held = tonumber(string.match(mark, '^%d+') or '0')
"""

_CLAIM_TERM = f"""
{_HELD_TERM}
if ARGV[3] == '' and tonumber(ARGV[1]) < held then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[4] ~= '' then redis.call('SET', KEYS[2], ARGV[4], 'NX') end
return tonumber(ARGV[1]) == held and mark ~= ARGV[2] and 2 or 1
"""

# Workers never create the events stream: reports to a stream that no leader reads would be lost.
_BEGIN = f"""
{_HELD_TERM}
if tonumber(ARGV[1]) < held then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[4])
redis.call('SET', KEYS[5], ARGV[5])
redis.call('XADD', KEYS[4], '*', 'd', '')
redis.call('XTRIM', KEYS[4], 'MAXLEN', '0')
return 1
"""

_MAX_ID_PART = 2**64 - 1
"""The maximum of either part of a stream id."""


class Deposed(Exception):
    """Another scheduler leads. Nothing was pushed."""


class TermForgotten(Deposed):
    """Redis has lost the leader's term, or all of its data. Nothing was pushed."""


class ServerState(NamedTuple):
    """The state of the leader and the generation in Redis."""

    generation: str | None
    applied: Applied | None
    server: str
    """The run id of the server, which changes with every restart."""
    readable: bool = True
    """The events stream exists and has the right type."""
    usable: bool = True
    """Workers can find the events stream and append to it."""
    same_database: bool = True
    """Redis belongs to the same incarnation of Postgres as this process, as far as known."""
    claimed: Attempt | None = None
    """An attempt from a commit after `applied`, if tasks were dispatched since."""

    def reached(self, cursor: str) -> bool:
        """Return whether Redis still knows that events up to `cursor` were applied."""
        if cursor == "0-0":
            return True
        return self.applied is not None and stream_position(self.applied.cursor) >= stream_position(cursor)

    def is_ahead(self, generation: str, cursor: str) -> bool:
        """Return whether Redis has a later state than `cursor` of `generation`: then Postgres has lost commits."""
        if self.generation is None:
            return not self.same_database
        if self.generation != generation:
            return age(self.generation) != () and age(self.generation) >= age(generation)
        applied = self.applied
        if applied is None or applied.generation != generation:
            return False
        return stream_position(applied.cursor) > stream_position(cursor)


class Terms:
    """Claims terms, begins generations, and reads their state in Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._claim_term = redis.register_script(_CLAIM_TERM)
        self._begin = redis.register_script(_BEGIN)
        self._name = secrets.token_hex(4)
        self._database = ""

    def claim(self, term: int, database: str, *, overrule: bool = False) -> bool:
        """Let Redis accept the pushes of this term. `overrule` replaces even a later term, which this Postgres never
        issued.

        `database` names the incarnation of Postgres that issued the term; empty if it has no name. Return whether this
        process is the first to claim the number: if not, Postgres has lost commits.
        """
        self._database = database
        keys = [self._keys.term, self._keys.database]
        answer = self._claim_term(keys=keys, args=[term, self.mark(term), "overrule" if overrule else "", database])
        if not answer:
            raise Deposed
        return bool(answer == 1)

    def mark(self, term: int) -> str:
        """Return the value of the key `term` while this process leads in a term."""
        return f"{term} {self._name}"

    def state(self, generation: str, cursor: str) -> ServerState:
        """Read the state of a generation that was read up to `cursor`, to detect lost data.

        Foreign values count as lost: a new generation replaces them.
        """
        keys, pipeline = self._keys, self._redis.pipeline(transaction=False)
        pipeline.get(keys.generation)
        pipeline.get(keys.server)
        pipeline.get(keys.applied)
        pipeline.type(keys.events(generation))
        pipeline.get(keys.database)
        pipeline.get(keys.claimed)
        pipeline.info("server")
        answers = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
                raise answer
        current, began_on, applied, events_type, database, claimed, info = answers
        server = str(info["run_id"])
        return ServerState(
            generation=current.decode(errors="replace") if isinstance(current, bytes) else None,
            applied=keys.signing.read(Applied, keys.applied, applied) if isinstance(applied, bytes) else None,
            server=server,
            readable=events_type == b"stream",
            usable=events_type == b"stream"
            and began_on == server.encode()
            and entry_after(cursor) != cursor
            and not isinstance(database, Exception),
            same_database=not (self._database and isinstance(database, bytes)) or database == self._database.encode(),
            claimed=decode_or_none(Attempt, claimed) if isinstance(claimed, bytes) else None,
        )

    def accept_database(self) -> None:
        """Let the generation continue with the current incarnation of Postgres."""
        self._redis.set(self._keys.database, self._database)

    def begin(self, term: int, generation: str, server: str) -> None:
        """Begin a new generation on the server with this run id. Raise `Deposed` if another leader has taken over."""
        keys = [self._keys.term, self._keys.generation, self._keys.server, self._keys.events(generation)]
        arguments: list[Argument] = [term, self.mark(term), generation, server, self._database]
        if not self._begin(keys=[*keys, self._keys.database], args=arguments):
            raise Deposed

    def remove_older(self, generation: str, *, later: bool = False) -> None:
        """Delete the streams of earlier generations.

        Pass `later` only if Postgres has forgotten the later generations: otherwise their leader may have replaced this
        one.
        """
        for pattern in (self._keys.events("*"), self._keys.queue("*", "*")):
            start = pattern.index("*")
            old_keys = [
                key
                for key in self._redis.scan_iter(match=_literal(pattern))
                if is_over(key.decode(errors="replace")[start:].partition(":")[0], generation, later=later)
            ]
            if old_keys:
                self._redis.delete(*old_keys)


def entry_after(cursor: str) -> str:
    """Return the stream id that follows a cursor. The very last id has no successor and is returned itself."""
    milliseconds, sequence = stream_position(cursor)
    if sequence < _MAX_ID_PART:
        return f"{milliseconds}-{sequence + 1}"
    return f"{milliseconds + 1}-0" if milliseconds < _MAX_ID_PART else cursor


def _literal(pattern: str) -> str:
    """Escape the braces of the hash tag, which SCAN patterns would interpret."""
    return pattern.replace("{", "[{]").replace("}", "[}]")
