"""The leader's term and the generation of the streams, as Redis remembers them."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from redis import Redis

from orchestrator.domain.fleet.generation import age, is_over
from orchestrator.transport.codec import Applied, Attempt, decode_or_none, stream_position
from orchestrator.transport.connection import Argument
from orchestrator.transport.keys import Keys

# A term stands there with a name of the process that has it: should Postgres lose commits, it issues a term twice. What
# does not begin with a number, or is no string at all, was not written by a leader: it counts as nothing, and SET
# replaces it.
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

_LARGEST = 2**64 - 1
"""Of either part of a stream's ids."""


class Deposed(Exception):
    """Another scheduler leads, and nothing was pushed."""


class TermForgotten(Deposed):
    """Redis does not know the leader: it has lost its data, or this key. Nothing was pushed."""


class ServerState(NamedTuple):
    """What Redis remembers of the leader and the generation."""

    generation: str | None
    applied: Applied | None
    server: str
    """Changes whenever the server restarts."""
    readable: bool = True
    """The events stream is there, and is a stream."""
    usable: bool = True
    """Workers can find it, and add to it."""
    same_database: bool = True
    """Redis remembers the same Postgres that is used now, as far as known."""
    claimed: Attempt | None = None
    """An attempt of a later commit than that of `applied`, if tasks were handed out since."""

    def reached(self, cursor: str) -> bool:
        """Say whether Redis still remembers that events up to `cursor` were applied."""
        if cursor == "0-0":
            return True
        return self.applied is not None and stream_position(self.applied.cursor) >= stream_position(cursor)

    def is_ahead(self, generation: str, cursor: str) -> bool:
        """Say whether Redis remembers something later than this: then Postgres has lost commits."""
        if self.generation is None:
            return not self.same_database
        if self.generation != generation:
            return age(self.generation) != () and age(self.generation) >= age(generation)
        applied = self.applied
        if applied is None or applied.generation != generation:
            return False
        return stream_position(applied.cursor) > stream_position(cursor)


class Terms:
    """Claims terms, begins generations, and reads what Redis remembers of them."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._claim_term = redis.register_script(_CLAIM_TERM)
        self._begin = redis.register_script(_BEGIN)
        self._name = secrets.token_hex(4)
        self._database = ""

    def claim(self, term: int, database: str, *, overrule: bool = False) -> bool:
        """Make this term the one whose pushes are accepted; `overrule` a later one, which Postgres never issued.

        `database` names the life of the Postgres that issued it; empty if that has no name. Say whether the term is
        the first of its number: not if Postgres has lost commits.
        """
        self._database = database
        keys = [self._keys.term, self._keys.database]
        answer = self._claim_term(keys=keys, args=[term, self.mark(term), "overrule" if overrule else "", database])
        if not answer:
            raise Deposed
        return bool(answer == 1)

    def mark(self, term: int) -> str:
        """Return what stands in Redis while this process leads in a term."""
        return f"{term} {self._name}"

    def state(self, generation: str, cursor: str) -> ServerState:
        """Read what Redis remembers of a generation that was read up to `cursor`, to learn whether it lost anything.

        What does not read as ours is as good as lost: it is replaced when a new generation begins.
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
        found, began_on, applied, kind, database, claimed, info = answers
        server = str(info["run_id"])
        return ServerState(
            generation=found.decode(errors="replace") if isinstance(found, bytes) else None,
            applied=keys.signing.read(Applied, keys.applied, applied) if isinstance(applied, bytes) else None,
            server=server,
            readable=kind == b"stream",
            usable=kind == b"stream"
            and began_on == server.encode()
            and entry_after(cursor) != cursor
            and not isinstance(database, Exception),
            same_database=not (self._database and isinstance(database, bytes)) or database == self._database.encode(),
            claimed=decode_or_none(Attempt, claimed) if isinstance(claimed, bytes) else None,
        )

    def accept_database(self) -> None:
        """Have the generation go on with the life of Postgres that is used now."""
        self._redis.set(self._keys.database, self._database)

    def begin(self, term: int, generation: str, server: str) -> None:
        """Announce a new generation; refused if another leader has taken over.

        `server` is the life of the server for which it is meant: `state` has it.
        """
        keys = [self._keys.term, self._keys.generation, self._keys.server, self._keys.events(generation)]
        arguments: list[Argument] = [term, self.mark(term), generation, server, self._database]
        if not self._begin(keys=[*keys, self._keys.database], args=arguments):
            raise Deposed

    def remove_older(self, generation: str, *, later: bool = False) -> None:
        """Remove the streams of earlier generations.

        Of `later` ones only if Postgres has forgotten them: else their leader may have replaced this one.
        """
        for pattern in (self._keys.events("*"), self._keys.queue("*", "*")):
            start = pattern.index("*")
            old = [
                key
                for key in self._redis.scan_iter(match=_literal(pattern))
                if is_over(key.decode(errors="replace")[start:].partition(":")[0], generation, later=later)
            ]
            if old:
                self._redis.delete(*old)


def entry_after(cursor: str) -> str:
    """Return the first id after a cursor; the very last has none, and no stream goes on after it."""
    milliseconds, sequence = stream_position(cursor)
    if sequence < _LARGEST:
        return f"{milliseconds}-{sequence + 1}"
    return f"{milliseconds + 1}-0" if milliseconds < _LARGEST else cursor


def _literal(pattern: str) -> str:
    """Escape the hash tag's braces, which mean something else in a pattern."""
    return pattern.replace("{", "[{]").replace("}", "[}]")
