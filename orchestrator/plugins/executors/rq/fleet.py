"""An RQ fleet, through its own library: blocking calls, for a few threads that serve all executions.

A job's key is watched while it is looked for and created, so that of two workers that submit the same name one creates
it.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import WatchError
from rq import Queue, Worker
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from orchestrator.domain.executors.options import Broken, Execution, Outcome
from orchestrator.plugins.executors.rq import Rq
from orchestrator.workers.executors.protocol import finished, raised

_ENDED = frozenset({"finished", "failed", "stopped", "canceled", "lost"})
_UNSERIALIZABLE = "Unserializable return value"
"""What RQ writes instead of a result that its serializer refuses."""
_PLAIN = {
    ("datetime", "date"), ("datetime", "datetime"), ("datetime", "time"), ("datetime", "timedelta"),
    ("datetime", "timezone"), ("decimal", "Decimal"), ("uuid", "UUID"), ("builtins", "set"), ("builtins", "frozenset"),
}  # fmt: skip
_AT_ONCE = 1_000
_KEEPING = "orchestrator.workers.executors.rq_side.call"
"""What the fleet calls where prints are wanted: the name that the previous release knows `prints.py` by."""
_LINES = "orchestrator_lines"
"""Where that leaves them in the `meta` of a job; it is loaded by the fleet's workers, and not here."""

_EXPIRES = 60
"""Seconds after which Redis deletes a job whose end is in Postgres."""
_STOP_AGAIN = 10
"""Seconds after which a worker that still has a job gets another stop command: the first may have been lost."""
_STOP = """
local status, worker = unpack(redis.call('HMGET', KEYS[1], 'status', 'worker_name'))
if status ~= 'started' or not worker then return 0 end
if redis.call('HGET', ARGV[1] .. worker, 'current_job') ~= ARGV[2] then return 0 end
if not redis.call('SET', KEYS[2], worker, 'NX', 'EX', ARGV[5]) then return 0 end
local heard = redis.call('PUBLISH', ARGV[3] .. worker, ARGV[4])
if heard == 0 then redis.call('DEL', KEYS[2]) end
return heard
"""
"""Stop a job once, however many cancel it, and only while it is its worker's current job. A worker kills what it runs
when it has read the command: by then that may be the next job, or itself."""


class Seen(NamedTuple):
    """What a look shows of a job."""

    status: str
    meta: bytes

    @property
    def has_ended(self) -> bool:
        """Say whether it will change no more."""
        return self.status in _ENDED


class _Reader(pickle.Unpickler):
    """Reads values, and loads no code: a program that can write into the fleet's Redis must not command our workers."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few types that are values."""
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, and only plain data is read")
        return super().find_class(module, name)


class PlainPickle:
    """The usual serializer of RQ, of which only plain data is read."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Write a value as any Python reads it."""
        return pickle.dumps(value, protocol=4)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Read plain data; anything else is an UnpicklingError."""
        return _Reader(io.BytesIO(data)).load()


SERIALIZERS: Mapping[str, Any] = {"pickle": PlainPickle, "json": JSONSerializer}


def submit(redis: Redis, execution: Execution, options: Rq) -> None:
    """Enqueue a job under the execution's name, unless there is one."""
    serializer = SERIALIZERS[options.serializer]
    queue = Queue(options.queue, connection=redis, serializer=serializer)
    limit = options.job_timeout if options.job_timeout is not None else options.backstop(execution.timeout)
    kept = math.ceil(options.result_ttl)
    key = Job.key_for(execution.name)
    while True:
        with redis.pipeline() as pipeline:
            pipeline.watch(key)  # type: ignore[no-untyped-call]
            if pipeline.exists(key):
                return
            pipeline.multi()
            function, arguments, keywords = _called(execution, options)
            job = Job.create(
                function,
                args=arguments,
                kwargs=keywords,
                id=execution.name,
                connection=redis,
                serializer=serializer,
                origin=options.queue,
                description=execution.task,  # not the call, which RQ would show with its arguments
                timeout=-1 if limit is None else math.ceil(limit),
                result_ttl=kept,
                failure_ttl=kept,
                meta={"task_id": execution.task_id},
            )
            queue.enqueue_job(job, pipeline=pipeline)
            try:
                pipeline.execute()
                return
            except WatchError:
                continue


def _called(execution: Execution, options: Rq) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return what the fleet calls: the function itself or, where its prints are wanted, what keeps these."""
    function, keywords = options.function.replace(":", "."), dict(execution.input)
    if not options.prints:
        return function, tuple(execution.arguments), keywords
    return _KEEPING, (function, list(execution.arguments), keywords), {}


def look(redis: Redis, queues: Collection[str], names: Collection[str]) -> dict[str, Seen]:
    """Return how the jobs of these names are doing; those that there are none of are left out.

    One whose worker has not renewed its claim in time is lost. RQ would say so, too, once another worker of it looks;
    its own way of saying it is not called here, because that runs whatever a job names as its callback.
    """
    seen: dict[str, Seen] = {}
    ordered = list(names)
    now = redis.time()[0]
    for start in range(0, len(ordered), _AT_ONCE):
        some = ordered[start : start + _AT_ONCE]
        with redis.pipeline(transaction=False) as pipeline:
            for name in some:
                pipeline.hmget(Job.key_for(name), "status", "meta")
            found = pipeline.execute()
        for name, (status, meta) in zip(some, found, strict=True):
            if status is not None:
                seen[name] = Seen(status.decode(), meta or b"")
    for queue in queues:
        late: Any = redis.zrangebyscore(StartedJobRegistry(queue, connection=redis).key, 0, now)
        for entry in late:
            name = entry.decode().partition(":")[0]
            if name in seen and seen[name].status == "started":
                seen[name] = seen[name]._replace(status="lost")
    return seen


def worker_lost(name: str) -> Broken:
    """Say that the worker of a job is gone."""
    return Broken("WorkerLost", f"The worker of RQ that ran the job {name} died.")


def progress(meta: bytes, serializer: str) -> tuple[float, float | None, str] | None:
    """Return how far a job has come, where it says so in its `meta`: a share, or done, total and message."""
    if not meta:
        return None
    try:
        said = SERIALIZERS[serializer].loads(meta).get("progress")
        if isinstance(said, Mapping):
            total = said.get("total")
            return float(said["done"]), None if total is None else float(total), str(said.get("message", ""))
        return None if said is None else (float(said), 1.0, "")
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, pickle.UnpicklingError):
        return None  # it is somebody else's `meta`, and may hold what it likes


def printed(meta: bytes, serializer: str) -> list[str]:
    """Return the lines that a job has printed, where it was asked to keep them."""
    if not meta:
        return []
    try:
        said = SERIALIZERS[serializer].loads(meta).get(_LINES)
    except (ValueError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
        return []  # as above
    return [str(line) for line in said] if isinstance(said, list) else []


def collect(redis: Redis, name: str, options: Rq) -> Outcome | None:
    """Return how an ended job ended; None if it is gone."""
    try:
        job = Job.fetch(name, connection=redis, serializer=SERIALIZERS[options.serializer])
        status = job.get_status(refresh=False)
        result = job.latest_result()
    except NoSuchJobError:
        return None
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, AttributeError, IndexError) as error:
        return Broken("UnreadableOutput", f"The work is done, but its result cannot be read: {error}.", False)
    if status is JobStatus.FINISHED:
        output = None if result is None else result.return_value
        if output == _UNSERIALIZABLE:
            return Broken("UnreadableOutput", "The work is done, but RQ could not write its result.", False)
        return finished(output)
    if status in (JobStatus.STOPPED, JobStatus.CANCELED):
        return Broken("JobStopped", f"Somebody has stopped the job {name} in RQ.", False)
    traceback = (result.exc_string if result is not None else None) or ""
    if "AbandonedJobError" in traceback:
        return worker_lost(name)
    if not traceback:
        return Broken("JobFailed", f"RQ says that the job {name} failed, and not why.")
    kind, message = raised(traceback, "JobFailed")
    return Broken(kind, message, detail=traceback)


def stop(redis: Redis, name: str, options: Rq) -> None:
    """Have a job end: taken out of its queue, or stopped by its worker. Whether it has, a look shows."""
    serializer = SERIALIZERS[options.serializer]
    try:
        job = Job.fetch(name, connection=redis, serializer=serializer)
        if job.is_started:
            command = json.dumps({"command": "stop-job", "job_id": name})
            channel = PUBSUB_CHANNEL_TEMPLATE % ""
            words = (Worker.redis_worker_namespace_prefix, name, channel, command, _STOP_AGAIN)
            redis.eval(_STOP, 2, Job.key_for(name), _stopping(name), *words)
        elif not job.is_queued or redis.lrem(Queue(options.queue, connection=redis).key, 1, name):
            job.cancel()  # else a worker has just taken it, and will soon get the command to stop
    except (NoSuchJobError, InvalidJobOperation):
        return


def expire(redis: Redis, name: str) -> None:
    """Have what is left of a job that has ended go by itself."""
    for key in (Job.key_for(name), f"rq:results:{name}"):
        redis.expire(key, _EXPIRES)


def delete(redis: Redis, name: str) -> None:
    """Clear away a job that has ended, and its result."""
    try:
        job = Job.fetch(name, connection=redis, serializer=PlainPickle)
    except NoSuchJobError:
        return
    job.delete()
    redis.delete(f"rq:results:{name}", _stopping(name))


def _stopping(name: str) -> str:
    """Return the key that says that the worker of a job got the command to stop it."""
    return f"orchestrator:rq-stop:{name}"
