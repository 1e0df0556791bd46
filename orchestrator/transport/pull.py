"""Work for programs that poll, in Redis: offered by its watcher, leased, completed, forgotten.

    offer ──▶ leased to nobody ── first look ──▶ waiting ── take ──▶ leased ── complete ──▶ done ── release ──▶ ended
                                                    ▲                  │
                                                    ├─ silent too long ┤ (so often, and then: lost)
                                                    └─ given back ─────┘
    any ── cancel ──▶ cancelled

An execution is looked at only once its external id is in Postgres, so nobody has taken what a new watcher would submit.

Redis may lose all of it, or come back with an older state. Each execution carries the generation (`keys.py`) in which
it was last looked at. In another generation, and while there is none, it is leased to nobody, and heartbeats and
completions find it `unknown`. Its watcher renews it, or offers it again where it is missing: as a lease whose holder is
not known. The first heartbeat or completion that names the execution takes this lease over; if none comes in time, the
work waits for the next poll.

A completion is answered when the end is in Postgres. `ended` and `cancelled` stay for an hour, for late and repeated
requests. A lease has an id of its own, and only the last one counts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from redis import Redis

from orchestrator.sealing import VALUE, Sealed, open_data
from orchestrator.transport.codec import Malformed, decode, encode, prepare
from orchestrator.transport.keys import Keys

KEPT = 3_600
"""Seconds that anything is kept here after the last word about it."""
_MOST = 500
"""Executions that one call looks at."""
_NOBODY: Mapping[str, bytes] = {}

_CURRENT = """
local function current()
  local generation, server = unpack(redis.call('MGET', ARGV[1], ARGV[2]))
  if not (generation and server) then return false end
  return string.find(redis.call('INFO', 'server'), 'run_id:' .. server, 1, true) and generation
end
local function is_unknown(s, g)
  if s ~= 'leased' and s ~= 'waiting' then return not s end
  local generation = current()
  return not generation or (g or generation) ~= generation
end
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local function after(lease) return string.format('%.0f', ms + tonumber(lease)) end
"""
"""For all scripts: their first two arguments are the keys of the generation and of its server."""

_OFFER = """
local generation = current()
if not generation then return -1 end
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 's', 'leased', 'b', ARGV[3], 'v', ARGV[4], 'n', 0, 'u', 0, 'g', generation)
redis.call('HSET', KEYS[1], 'd', ARGV[5], 'm', ARGV[6], 't', ARGV[7])
if ARGV[8] == '1' then redis.call('HSET', KEYS[1], 'q', '', 'u', after(ARGV[5])) end
redis.call('EXPIRE', KEYS[1], ARGV[9])
return 1
"""
_TAKE = """
local generation = current()
for _ = 1, generation and 100 or 0 do
  local place, first, least
  for _, waiting in ipairs(KEYS) do
    local found = redis.call('ZRANGE', waiting, 0, 0, 'WITHSCORES')
    if found[1] and (not least or tonumber(found[2]) < least) then
      place, first, least = waiting, found[1], tonumber(found[2])
    end
  end
  if not place then return false end
  redis.call('ZREM', place, first)
  local key = ARGV[3] .. first
  local s, g, d = unpack(redis.call('HMGET', key, 's', 'g', 'd'))
  if s == 'waiting' and (g or generation) == generation then
    redis.call('HSET', key, 's', 'leased', 'q', ARGV[4], 'w', ARGV[5], 'u', after(d))
    local number = redis.call('HINCRBY', key, 'n', 1)
    return {first, redis.call('HGET', key, 'b'), number}
  end
end
return false
"""
_BEAT = """
local s, q, d, g = unpack(redis.call('HMGET', KEYS[1], 's', 'q', 'd', 'g'))
if is_unknown(s, g) then return 'unknown' end
if s == 'cancelled' then return s end
if q == '' and s == 'leased' then
  q = ARGV[3]
  redis.call('HSET', KEYS[1], 'q', q)
  redis.call('HINCRBY', KEYS[1], 'n', 1)
end
if q ~= ARGV[3] then return 'lost' end
if s == 'leased' then
  redis.call('HSET', KEYS[1], 'u', after(d))
  if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'p', ARGV[4]) end
end
return s
"""
_GIVE_BACK = """
local s, q, v, g = unpack(redis.call('HMGET', KEYS[1], 's', 'q', 'v', 'g'))
if is_unknown(s, g) then return 'unknown' end
if s == 'cancelled' then return s end
if q ~= ARGV[3] and q ~= '' then return 'lost' end
if s ~= 'leased' then return s end
if q ~= '' then redis.call('HINCRBY', KEYS[1], 'n', -1) end
redis.call('HSET', KEYS[1], 's', 'waiting', 'q', 'nobody')
redis.call('ZADD', ARGV[5] .. v, 0, ARGV[4])
redis.call('PUBLISH', ARGV[6], v)
return 'returned'
"""
_COMPLETE = """
local s, q, v, g, h = unpack(redis.call('HMGET', KEYS[1], 's', 'q', 'v', 'g', 'h'))
if is_unknown(s, g) then return 'unknown' end
if s == 'cancelled' then return s end
if q ~= ARGV[3] and q ~= '' then return 'lost' end
if (s == 'done' or s == 'ended') and h and h ~= ARGV[8] then return 'differs' end
if s == 'leased' or s == 'waiting' then
  redis.call('ZREM', ARGV[6] .. v, ARGV[5])
  redis.call('HSET', KEYS[1], 's', 'done', 'o', ARGV[4], 'q', ARGV[3], 'h', ARGV[8])
  redis.call('PUBLISH', ARGV[7], ARGV[5])
  return 'done'
end
if s == 'done' then return 'again' end
return s
"""
_LOOK = """
local answer, generation = {}, current()
for place, key in ipairs(KEYS) do
  local found = redis.call('HMGET', key, 's', 'u', 'n', 'm', 'v', 'o', 'w', 'g', 'd', 'p')
  local s, u, n, m, v, o, w, g, d, p = unpack(found)
  if s then redis.call('EXPIRE', key, ARGV[3]) end
  if not generation then
    s = 'unsettled'
  elseif s and g ~= generation then
    redis.call('HSET', key, 'g', generation)
    if g and (s == 'leased' or s == 'waiting') then
      s, u = 'leased', after(d)
      redis.call('ZREM', ARGV[4] .. v, ARGV[5 + place])
      redis.call('HSET', key, 's', s, 'q', '', 'u', u)
    end
  end
  if s == 'leased' and (u == '0' or u == ARGV[5 + #KEYS + place]) then
    if tonumber(n) >= tonumber(m) then
      s = 'lost'
    else
      s = 'waiting'
      redis.call('ZADD', ARGV[4] .. v, now[1] .. string.format('%06d', now[2]), ARGV[5 + place])
      redis.call('PUBLISH', ARGV[5], v)
    end
    redis.call('HSET', key, 's', s)
  end
  answer[place] = {s or '', o or '', w or '', tonumber(n or 0), u or '', p or ''}
end
return answer
"""
_END = """
local s, v = unpack(redis.call('HMGET', KEYS[1], 's', 'v'))
if not s then
  if ARGV[3] == '1' then
    redis.call('HSET', KEYS[1], 's', 'cancelled')
    redis.call('EXPIRE', KEYS[1], ARGV[7])
  end
  return 0
end
if ARGV[3] == '0' and (s == 'leased' or s == 'waiting') then return 0 end
if s ~= 'ended' and s ~= 'cancelled' then
  redis.call('HSET', KEYS[1], 's', (s == 'done' and ARGV[3] == '0') and 'ended' or 'cancelled')
end
redis.call('HDEL', KEYS[1], 'b', 'o', 'p')
if v then redis.call('ZREM', ARGV[5] .. v, ARGV[4]) end
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('PUBLISH', ARGV[6], ARGV[4])
redis.call('PUBLISH', ARGV[6], ARGV[4] .. '!')
return 1
"""


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    """Of the execution."""
    service: str
    task: str
    task_id: str
    body: bytes
    """The input of the work: JSON with `input` and `params`; empty where that is stored elsewhere."""
    lease: float
    """Seconds."""
    max_leases: int
    step: str = ""
    stored: bytes = b""
    """The reference to the body, where it is too large to stand here."""


prepare(Offer)


class Leased(NamedTuple):
    """Leased work."""

    queue_id: str
    """Of the lease."""
    number: int
    """How many have had it, this one included."""
    offer: Offer


class State(NamedTuple):
    """The state of an execution, for its watcher."""

    state: str
    """Empty if there is nothing of the kind, `unsettled` while there is no generation."""
    outcome: bytes
    """JSON with `result` and `error`, once it is done."""
    problem: str
    """Why that cannot be read."""
    worker: str
    """Its last holder."""
    leases: int
    beat: bytes
    """Another one with each heartbeat."""
    progress: bytes = b""
    """JSON with `fraction` and `text`: the last that a holder has said."""


def let_go(name: str) -> str:
    """Return the announcement that an execution has no watcher any more; its name alone also says that it was
    completed."""
    return f"{name}!"


class Pulls:
    """Offered work and its state."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = {
            name: redis.register_script(_CURRENT + text)
            for name, text in {
                "offer": _OFFER,
                "take": _TAKE,
                "beat": _BEAT,
                "give_back": _GIVE_BACK,
                "complete": _COMPLETE,
                "look": _LOOK,
                "end": _END,
            }.items()
        }

    def offer(self, offer: Offer, *, again: bool = False) -> bool:
        """Offer work, once under this name: from the first look on or, where it was lost and is offered `again`, if no
        holder is heard of within one lease. Say whether Redis has a generation to offer it in."""
        place = self._keys.pull(offer.name)
        body = self._sealed(place, encode(offer))
        words = (body, offer.service, round(offer.lease * 1000), offer.max_leases, offer.task_id, int(again), KEPT)
        return int(self._run("offer", [place], *words)) >= 0

    def take(self, worker: str, services: Sequence[str]) -> Leased | None:
        """Lease the longest waiting work of some services."""
        token = secrets.token_hex(8)
        while True:
            waiting = [self._keys.pull_waiting(service) for service in services]
            found = self._run("take", waiting, self._keys.pull(""), token, worker)
            if not found:
                return None
            name = found[0].decode()
            try:
                offer = decode(Offer, self._opened(self._keys.pull(name), found[1]))
            except Malformed:
                continue  # not ours, or of another release: its watcher finds that nobody completes it
            except Sealed:
                self._put_back(name)
                raise
            return Leased(f"{name}~{token}", int(found[2]), offer)

    def leave(self, taken: Leased) -> None:
        """Leave to others, behind all that waits, what was taken and cannot be read now."""
        self._put_back(taken.offer.name, time.time() * 1_000_000)

    def _put_back(self, name: str, place: float = 0) -> None:
        """Leave to others what this process cannot read."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hget(self._keys.pull(name), "v")
        pipeline.hincrby(self._keys.pull(name), "n", -1)
        pipeline.hset(self._keys.pull(name), "s", "waiting")
        service = pipeline.execute()[0] or b""
        self._redis.zadd(self._keys.pull_waiting(service.decode()), {name: place})

    def beat(self, queue_id: str, progress: bytes = b"") -> str:
        """Begin a lease anew; return where the work stands: `leased`, if it is still theirs."""
        name, token = _parts(queue_id)
        place = self._keys.pull(name)
        return self._said(self._run("beat", [place], token, self._sealed(place, progress) if progress else b""))

    def give_back(self, queue_id: str) -> str:
        """Offer leased work to the next poll; return where it stands: `returned`, if it was theirs."""
        (name, token), keys = _parts(queue_id), self._keys
        words = (token, name, keys.pull_waiting(""), keys.pull_offers)
        return self._said(self._run("give_back", [keys.pull(name)], *words))

    def complete(self, queue_id: str, outcome: bytes, same: bytes) -> str:
        """Say how it ended; return where the work stands: `done`, `again` if that was said before, `ended` if it is
        in Postgres, `differs` if it was completed before with other bytes for `same`."""
        name, token = _parts(queue_id)
        place, keys = self._keys.pull(name), self._keys
        digest = blake2b(same, digest_size=8).digest() if keys.vault is None else keys.vault.digest(same)
        words = (token, self._sealed(place, outcome), name, keys.pull_waiting(""), keys.pull_ends, digest)
        return self._said(self._run("complete", [place], *words))

    def task_of(self, queue_id: str) -> str | None:
        """Return the id of the task that some work belongs to."""
        found = self._redis.hget(self._keys.pull(_parts(queue_id)[0]), "t")
        return found.decode() if isinstance(found, bytes) else found

    def look(self, names: Sequence[str], silent: Mapping[str, bytes] = _NOBODY) -> dict[str, State]:
        """Return the state of executions; new ones, and those with a silent holder, become open to all.

        `silent` has the last heartbeats of holders that were silent for one lease, by the clock of the watcher: Redis's
        own may be set.
        """
        found: dict[str, State] = {}
        for start in range(0, len(names), _MOST):
            some = names[start : start + _MOST]
            places = [self._keys.pull(name) for name in some]
            last = [silent.get(name, b"") for name in some]
            rows = self._run("look", places, KEPT, self._keys.pull_waiting(""), self._keys.pull_offers, *some, *last)
            for name, place, (state, outcome, worker, leases, beat, far) in zip(some, places, rows, strict=True):
                said, problem = self._read(place, outcome) if state == b"done" else (b"", "")
                progress = self._read(place, far)[0] if far else b""
                holder = worker.decode("utf-8", "replace")
                found[name] = State(state.decode(), said, problem, holder, int(leases), beat, progress)
        return found

    def cancel(self, name: str) -> None:
        """Cancel it, also where it is only about to be offered."""
        self._end(name, is_cancelled=True)

    def release(self, name: str) -> None:
        """Keep only that it has ended; an open one has another watcher by now."""
        self._end(name, is_cancelled=False)

    def _end(self, name: str, *, is_cancelled: bool) -> None:
        keys = self._keys
        words = (int(is_cancelled), name, keys.pull_waiting(""), keys.pull_ends, KEPT)
        self._run("end", [keys.pull(name)], *words)

    def _run(self, script: str, places: Sequence[str], *words: Any) -> Any:
        return self._scripts[script](keys=list(places), args=[self._keys.generation, self._keys.server, *words])

    @staticmethod
    def _said(state: Any) -> str:
        return bytes(state).decode()

    def _sealed(self, place: str, data: bytes) -> bytes:
        vault = self._keys.vault
        return self._keys.signing.sign(place, data if vault is None else vault.seal(VALUE, data))

    def _read(self, place: str, data: bytes) -> tuple[bytes, str]:
        try:
            return self._opened(place, data), ""
        except (Malformed, Sealed) as error:
            return b"", str(error)

    def _opened(self, place: str, data: bytes) -> bytes:
        return open_data(self._keys.signing.body(place, data), VALUE)


def _parts(queue_id: str) -> tuple[str, str]:
    name, _, token = queue_id.rpartition("~")
    return name, token
