"""Work for programs that poll, in Redis. The *watcher* is the worker that runs the task; it offers the work as an
execution. The *holder* is the program that leased it.

    offer ──▶ leased to nobody ── first look ──▶ waiting ── take ──▶ leased ── complete ──▶ done ── release ──▶ ended
                                                    ▲                  │
                                                    ├─ silent too long ┤ (after max_leases: lost)
                                                    └─ given back ─────┘
    any ── cancel ──▶ cancelled

An execution becomes available at its first look. The watcher looks only once the external id is in Postgres, so no
program can have leased work that a new watcher would submit again.

Redis may lose all executions, or return with an older state. Each execution carries the generation (`keys.py`) of its
last look. In another generation, or while there is none, it counts as leased to nobody, and heartbeats and completions
get `unknown`. The watcher then renews the execution. If it is missing, the watcher offers it again, as a lease with an
unknown holder. The first heartbeat or completion that names the execution takes this lease over; if none arrives in
time, the work waits for the next poll.

A completion is answered when the end is in Postgres. `ended` and `cancelled` stay for an hour, for late and repeated
requests. Each lease has its own id, and only the latest lease is valid.
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
"""Seconds to keep an execution after its last update."""
_BATCH = 500
"""The maximum number of executions per call of the script."""
_NONE_SILENT: Mapping[str, bytes] = {}

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
"""The prefix of all scripts. Their first two arguments are the keys `generation` and `server`."""

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
    """The name of the execution."""
    service: str
    task: str
    task_id: str
    body: bytes
    """The input of the work: JSON with `input` and `params`; empty if stored elsewhere."""
    lease: float
    """The duration of a lease in seconds."""
    max_leases: int
    step: str = ""
    stored: bytes = b""
    """The reference to the body if it is in the payload store, because of its size."""


prepare(Offer)


class Leased(NamedTuple):
    """Work leased to a program."""

    queue_id: str
    """The id of the lease."""
    number: int
    """The number of leases of this work so far, including this one."""
    offer: Offer


class State(NamedTuple):
    """The state of an execution, as its watcher sees it."""

    state: str
    """The state; empty if the execution does not exist, `unsettled` while there is no generation."""
    outcome: bytes
    """JSON with `result` and `error` once the execution is done."""
    problem: str
    """Why the outcome cannot be read, if so."""
    worker: str
    """The last holder of the execution."""
    leases: int
    beat: bytes
    """A value that changes with each heartbeat."""
    progress: bytes = b""
    """The last progress that a holder reported: JSON with `fraction` and `text`."""


def unwatched_message(name: str) -> str:
    """Return the message that an execution is no longer watched. The bare name announces its completion too."""
    return f"{name}!"


class Pulls:
    """Offers, leases and completes work."""

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
        """Offer work once under this name, available from the first look on. Work that was lost and is offered `again`
        is available if no holder sends a heartbeat within one lease. Return whether Redis has a generation."""
        key = self._keys.pull(offer.name)
        body = self._encrypt(key, encode(offer))
        arguments = (body, offer.service, round(offer.lease * 1000), offer.max_leases, offer.task_id, int(again), KEPT)
        return int(self._run("offer", [key], *arguments)) >= 0

    def take(self, worker: str, services: Sequence[str]) -> Leased | None:
        """Lease the work of these services that has waited longest."""
        token = secrets.token_hex(8)
        while True:
            waiting = [self._keys.pull_waiting(service) for service in services]
            row = self._run("take", waiting, self._keys.pull(""), token, worker)
            if not row:
                return None
            name = row[0].decode()
            try:
                offer = decode(Offer, self._decrypt(self._keys.pull(name), row[1]))
            except Malformed:
                continue  # foreign, or of another release: its watcher notices that nobody completes it
            except Sealed:
                self._put_back(name)
                raise
            return Leased(f"{name}~{token}", int(row[2]), offer)

    def return_unreadable(self, taken: Leased) -> None:
        """Return leased work that this process cannot read. Other processes get it after all other waiting work."""
        self._put_back(taken.offer.name, time.time() * 1_000_000)

    def _put_back(self, name: str, score: float = 0) -> None:
        """Return leased work that this process cannot read, for other processes."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hget(self._keys.pull(name), "v")
        pipeline.hincrby(self._keys.pull(name), "n", -1)
        pipeline.hset(self._keys.pull(name), "s", "waiting")
        service = pipeline.execute()[0] or b""
        self._redis.zadd(self._keys.pull_waiting(service.decode()), {name: score})

    def beat(self, queue_id: str, progress: bytes = b"") -> str:
        """Renew a lease. Return the state of the execution: `leased` if the lease is still valid."""
        name, token = _parts(queue_id)
        key = self._keys.pull(name)
        return self._decode_state(self._run("beat", [key], token, self._encrypt(key, progress) if progress else b""))

    def give_back(self, queue_id: str) -> str:
        """Return leased work to the next poll. Return `returned`, or the execution's state if the lease is lost."""
        (name, token), keys = _parts(queue_id), self._keys
        arguments = (token, name, keys.pull_waiting(""), keys.pull_offers)
        return self._decode_state(self._run("give_back", [keys.pull(name)], *arguments))

    def complete(self, queue_id: str, outcome: bytes, same: bytes) -> str:
        """Complete an execution. Return its state: `done`; `again` if this outcome was already reported; `ended` if the
        end is in Postgres; `differs` if it was completed with other bytes for `same`."""
        name, token = _parts(queue_id)
        key, keys = self._keys.pull(name), self._keys
        digest = blake2b(same, digest_size=8).digest() if keys.vault is None else keys.vault.digest(same)
        arguments = (token, self._encrypt(key, outcome), name, keys.pull_waiting(""), keys.pull_ends, digest)
        return self._decode_state(self._run("complete", [key], *arguments))

    def task_of(self, queue_id: str) -> str | None:
        """Return the id of the task of an execution."""
        task_id = self._redis.hget(self._keys.pull(_parts(queue_id)[0]), "t")
        return task_id.decode() if isinstance(task_id, bytes) else task_id

    def poll(self, names: Sequence[str], silent: Mapping[str, bytes] = _NONE_SILENT) -> dict[str, State]:
        """Return the states of executions. New ones, and those of silent holders, become available to all programs.

        `silent` has the last heartbeats of holders that were silent for one lease by the watcher's clock, because
        Redis's clock may be changed.
        """
        states: dict[str, State] = {}
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            keys = [self._keys.pull(name) for name in batch]
            beats = [silent.get(name, b"") for name in batch]
            rows = self._run("look", keys, KEPT, self._keys.pull_waiting(""), self._keys.pull_offers, *batch, *beats)
            for name, key, (state, outcome, worker, leases, beat, data) in zip(batch, keys, rows, strict=True):
                result, problem = self._read(key, outcome) if state == b"done" else (b"", "")
                progress = self._read(key, data)[0] if data else b""
                holder = worker.decode("utf-8", "replace")
                states[name] = State(state.decode(), result, problem, holder, int(leases), beat, progress)
        return states

    def cancel(self, name: str) -> None:
        """Cancel an execution, even before it is offered."""
        self._end(name, is_cancelled=True)

    def release(self, name: str) -> None:
        """Mark an execution as ended and delete its data. Leave an open one alone: it has a new watcher."""
        self._end(name, is_cancelled=False)

    def _end(self, name: str, *, is_cancelled: bool) -> None:
        keys = self._keys
        arguments = (int(is_cancelled), name, keys.pull_waiting(""), keys.pull_ends, KEPT)
        self._run("end", [keys.pull(name)], *arguments)

    def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._scripts[script](keys=list(keys), args=[self._keys.generation, self._keys.server, *arguments])

    @staticmethod
    def _decode_state(state: Any) -> str:
        return bytes(state).decode()

    def _encrypt(self, key: str, data: bytes) -> bytes:
        vault = self._keys.vault
        return self._keys.signing.sign(key, data if vault is None else vault.seal(VALUE, data))

    def _read(self, key: str, data: bytes) -> tuple[bytes, str]:
        try:
            return self._decrypt(key, data), ""
        except (Malformed, Sealed) as error:
            return b"", str(error)

    def _decrypt(self, key: str, data: bytes) -> bytes:
        return open_data(self._keys.signing.body(key, data), VALUE)


def _parts(queue_id: str) -> tuple[str, str]:
    name, _, token = queue_id.rpartition("~")
    return name, token
