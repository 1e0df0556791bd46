"""Import of waiting jobs from an RQ queue: each job is run once, by RQ or by us.

A job is moved from its queue to a list of ours in one step, out of reach of RQ's workers, and deleted after it was
enqueued here. If an import dies in between, the next one begins with that list. The job's id is its unique key here.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from redis import Redis
from rq import Queue
from rq.exceptions import DeserializationError
from rq.job import Job

from orchestrator.plugins.executors.rq.fleet import SERIALIZERS

_PAGE = 500
_TAKE = """
local taken = {}
for place, job in ipairs(ARGV) do
    if redis.call('LREM', KEYS[1], 1, job) == 1 then
        redis.call('RPUSH', KEYS[2], job)
        table.insert(taken, job)
    end
end
return taken
"""


class WaitingJob(NamedTuple):
    """A job, or the reason why it cannot be imported."""

    id: str
    function: str = ""
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    refusal: str = ""
    was_taken: bool = False
    """An earlier import took the job from its queue, and did not finish."""


class WaitingJobs:
    """The waiting jobs of one RQ queue."""

    def __init__(self, redis: Redis, queue: str, serializer: str) -> None:
        self._redis = redis
        self._serializer = SERIALIZERS[serializer]
        self._queue = Queue(queue, connection=redis, serializer=self._serializer)
        self._taken = f"orchestrator:rq-import:{queue}"
        self._take = redis.register_script(_TAKE)

    def __len__(self) -> int:
        return int(self._redis.llen(self._queue.key)) + int(self._redis.llen(self._taken))

    def pages(self) -> Iterator[list[WaitingJob]]:
        """Yield all waiting jobs in pages, beginning with those taken by an earlier import.

        If the caller removes jobs of a page, others move up; the next page follows when a page has no new jobs.
        """
        for key in (self._taken, self._queue.key):
            start, seen = 0, set[str]()
            while ids := self._page(key, start):
                new = [job_id for job_id in ids if job_id not in seen]
                seen = set(ids)
                if new:
                    yield self._read(new, was_taken=key == self._taken)
                else:
                    start += len(ids)

    def _page(self, key: str, start: int) -> list[str]:
        found: Any = self._redis.lrange(key, start, start + _PAGE - 1)
        return [job_id.decode() for job_id in found]

    def take(self, jobs: Sequence[WaitingJob]) -> list[WaitingJob]:
        """Move jobs out of the queue. Return those that no RQ worker has begun meanwhile."""
        waiting = [job.id for job in jobs if not job.was_taken]
        taken = {id_.decode() for id_ in self._take([self._queue.key, self._taken], waiting)} if waiting else set()
        return [job for job in jobs if job.was_taken or job.id in taken]

    def forget(self, jobs: Sequence[WaitingJob]) -> None:
        """Delete jobs that are enqueued here."""
        with self._redis.pipeline() as pipeline:
            for job in jobs:
                key = Job.key_for(job.id)
                pipeline.delete(key, f"{key}:dependencies", f"rq:results:{job.id}")
                pipeline.lrem(self._taken, 1, job.id)
            pipeline.execute()

    def _read(self, ids: Sequence[str], *, was_taken: bool) -> list[WaitingJob]:
        found = Job.fetch_many(ids, connection=self._redis, serializer=self._serializer)
        with self._redis.pipeline(transaction=False) as pipeline:
            for job_id in ids:
                pipeline.scard(Job.dependents_key_for(job_id))
            followers = pipeline.execute()
        read = zip(ids, found, followers, strict=True)
        return [_waiting(job_id, job, count)._replace(was_taken=was_taken) for job_id, job, count in read]


def _waiting(id: str, job: Job | None, followers: int) -> WaitingJob:
    if job is None:
        return WaitingJob(id, refusal="RQ has nothing but its id")
    if followers:
        return WaitingJob(id, refusal="other jobs of RQ wait for it")
    try:
        function, arguments, keywords = job.func_name, job.args, job.kwargs
    except DeserializationError as error:
        cause = error.__cause__
        reason = str(cause) if isinstance(cause, pickle.UnpicklingError) else "its format is unknown"
        return WaitingJob(id, refusal=f"its call cannot be read: {reason}")
    if job.instance is not None:
        return WaitingJob(id, refusal="it calls a method of an object")
    return WaitingJob(id, str(function), tuple(arguments or ()), dict(keywords or {}))
