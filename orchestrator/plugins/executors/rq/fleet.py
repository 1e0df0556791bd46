"""Blocking calls to an RQ fleet by RQ's library, for a few threads that serve all executions.

Creating a job watches its key: if two workers submit the same name, only one creates the job.
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
"""The value that RQ stores for a result that its serializer refuses."""
_PLAIN = {
    ("datetime", "date"), ("datetime", "datetime"), ("datetime", "time"), ("datetime", "timedelta"),
    ("datetime", "timezone"), ("decimal", "Decimal"), ("uuid", "UUID"), ("builtins", "set"), ("builtins", "frozenset"),
}  # fmt: skip
_BATCH = 1_000
_CAPTURING_CALL = "orchestrator.workers.executors.rq_side.call"
"""The function for jobs with option `prints`: the name by which the previous release knows `prints.py`."""
_LINES = "orchestrator_lines"
"""The key in a job's `meta` for the printed lines. `prints.py` is loaded only by the fleet's workers."""

_EXPIRY = 60
"""Seconds after which Redis deletes a job whose result is in Postgres."""
_STOP_AGAIN = 10
"""Seconds after which a worker that still runs a job is sent another stop command, in case the first was lost."""
_STOP = """
local status, worker = unpack(redis.call('HMGET', KEYS[1], 'status', 'worker_name'))
if status ~= 'started' or not worker then return 0 end
if redis.call('HGET', ARGV[1] .. worker, 'current_job') ~= ARGV[2] then return 0 end
if not redis.call('SET', KEYS[2], worker, 'NX', 'EX', ARGV[5]) then return 0 end
local heard = redis.call('PUBLISH', ARGV[3] .. worker, ARGV[4])
if heard == 0 then redis.call('DEL', KEYS[2]) end
return heard
"""
"""Send one stop command for a job, however many callers cancel it, and only while it is its worker's current job. A
worker kills whatever it runs when it reads the command: if late, that may be the next job, or the worker itself."""


class JobState(NamedTuple):
    """The polled state of a job."""

    status: str
    meta: bytes

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self.status in _ENDED


class _Reader(pickle.Unpickler):
    """Unpickles plain data without loading code, so that the fleet's Redis cannot control our workers."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few allowed types."""
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, but only plain data can be read")
        return super().find_class(module, name)


class PlainPickle:
    """RQ's default serializer, restricted to plain data when reading."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Pickle a value in a protocol that every Python reads."""
        return pickle.dumps(value, protocol=4)

    @staticmethod
    def loads(data: bytes) -> Any:
        """Unpickle plain data. Raise UnpicklingError for anything else."""
        return _Reader(io.BytesIO(data)).load()


SERIALIZERS: Mapping[str, Any] = {"pickle": PlainPickle, "json": JSONSerializer}


def submit(redis: Redis, execution: Execution, options: Rq) -> None:
    """Enqueue a job under the execution's name, unless it exists."""
    serializer = SERIALIZERS[options.serializer]
    queue = Queue(options.queue, connection=redis, serializer=serializer)
    limit = options.job_timeout if options.job_timeout is not None else options.backstop(execution.timeout)
    result_ttl = math.ceil(options.result_ttl)
    key = Job.key_for(execution.name)
    while True:
        with redis.pipeline() as pipeline:
            pipeline.watch(key)  # type: ignore[no-untyped-call]
            if pipeline.exists(key):
                return
            pipeline.multi()
            function, arguments, keywords = _call_of(execution, options)
            job = Job.create(
                function,
                args=arguments,
                kwargs=keywords,
                id=execution.name,
                connection=redis,
                serializer=serializer,
                origin=options.queue,
                description=execution.task,  # not the call, because RQ would show its arguments
                timeout=-1 if limit is None else math.ceil(limit),
                result_ttl=result_ttl,
                failure_ttl=result_ttl,
                meta={"task_id": execution.task_id},
            )
            queue.enqueue_job(job, pipeline=pipeline)
            try:
                pipeline.execute()
                return
            except WatchError:
                continue


def _call_of(execution: Execution, options: Rq) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return the function and arguments for RQ; with `prints`, those of the wrapper that captures output."""
    function, keywords = options.function.replace(":", "."), dict(execution.input)
    if not options.prints:
        return function, tuple(execution.arguments), keywords
    return _CAPTURING_CALL, (function, list(execution.arguments), keywords), {}


def poll(redis: Redis, queues: Collection[str], names: Collection[str]) -> dict[str, JobState]:
    """Return the state of these jobs. Missing jobs are left out.

    A job whose worker has not renewed its claim in time is lost. RQ finds that too when another of its workers checks,
    but its method is not called here, because it would run any callback that a job names.
    """
    states: dict[str, JobState] = {}
    ordered = list(names)
    now = redis.time()[0]
    for start in range(0, len(ordered), _BATCH):
        batch = ordered[start : start + _BATCH]
        with redis.pipeline(transaction=False) as pipeline:
            for name in batch:
                pipeline.hmget(Job.key_for(name), "status", "meta")
            found = pipeline.execute()
        for name, (status, meta) in zip(batch, found, strict=True):
            if status is not None:
                states[name] = JobState(status.decode(), meta or b"")
    for queue in queues:
        late: Any = redis.zrangebyscore(StartedJobRegistry(queue, connection=redis).key, 0, now)
        for entry in late:
            name = entry.decode().partition(":")[0]
            if name in states and states[name].status == "started":
                states[name] = states[name]._replace(status="lost")
    return states


def worker_lost(name: str) -> Broken:
    """Return the failure of a job whose worker died."""
    return Broken("WorkerLost", f"The worker of RQ that ran the job {name} died.")


def progress(meta: bytes, serializer: str) -> tuple[float, float | None, str] | None:
    """Return the progress in a job's `meta`, if any: a share, or done, total and message."""
    if not meta:
        return None
    try:
        reported = SERIALIZERS[serializer].loads(meta).get("progress")
        if isinstance(reported, Mapping):
            total = reported.get("total")
            return float(reported["done"]), None if total is None else float(total), str(reported.get("message", ""))
        return None if reported is None else (float(reported), 1.0, "")
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, pickle.UnpicklingError):
        return None  # this `meta` belongs to the application, and may contain anything


def printed(meta: bytes, serializer: str) -> list[str]:
    """Return the lines that a job printed, if option `prints` was set."""
    if not meta:
        return []
    try:
        lines = SERIALIZERS[serializer].loads(meta).get(_LINES)
    except (ValueError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
        return []  # as above
    return [str(line) for line in lines] if isinstance(lines, list) else []


def collect(redis: Redis, name: str, options: Rq) -> Outcome | None:
    """Return the outcome of an ended job; None if it is gone."""
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
        return Broken("JobStopped", f"The job {name} was stopped in RQ.", False)
    traceback = (result.exc_string if result is not None else None) or ""
    if "AbandonedJobError" in traceback:
        return worker_lost(name)
    if not traceback:
        return Broken("JobFailed", f"RQ says that the job {name} failed, but gives no reason.")
    kind, message = raised(traceback, "JobFailed")
    return Broken(kind, message, detail=traceback)


def stop(redis: Redis, name: str, options: Rq) -> None:
    """Ask RQ to cancel a job. The job may go on for a while; poll it to learn whether it has ended."""
    serializer = SERIALIZERS[options.serializer]
    try:
        job = Job.fetch(name, connection=redis, serializer=serializer)
        if job.is_started:
            command = json.dumps({"command": "stop-job", "job_id": name})
            channel = PUBSUB_CHANNEL_TEMPLATE % ""
            args = (Worker.redis_worker_namespace_prefix, name, channel, command, _STOP_AGAIN)
            redis.eval(_STOP, 2, Job.key_for(name), _stopping(name), *args)
        elif not job.is_queued or redis.lrem(Queue(options.queue, connection=redis).key, 1, name):
            job.cancel()  # otherwise a worker has just taken it, and will get the stop command soon
    except (NoSuchJobError, InvalidJobOperation):
        return


def expire(redis: Redis, name: str) -> None:
    """Let Redis delete an ended job and its result after a while."""
    for key in (Job.key_for(name), f"rq:results:{name}"):
        redis.expire(key, _EXPIRY)


def delete(redis: Redis, name: str) -> None:
    """Delete an ended job and its result."""
    try:
        job = Job.fetch(name, connection=redis, serializer=PlainPickle)
    except NoSuchJobError:
        return
    job.delete()
    redis.delete(f"rq:results:{name}", _stopping(name))


def _stopping(name: str) -> str:
    """Return the key that marks that the worker of a job was sent a stop command."""
    return f"orchestrator:rq-stop:{name}"
