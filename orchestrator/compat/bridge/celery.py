"""Celery's messages on Redis, as kombu writes them, and Celery's actions after the end of a task.

Celery's own code writes results and sends follow-up messages (chains, callbacks, chords), so that they match what its
clients expect. It sends into memory: the bridge moves those messages to Redis in the same step that settles the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty
from time import monotonic, sleep, time
from typing import Any

from celery import Celery, exceptions, maybe_signature, states
from celery.app.task import Context, Task
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendError, TaskRevokedError
from celery.utils.serialization import create_exception_cls
from kombu import Connection
from kombu.exceptions import EncodeError
from kombu.exceptions import OperationalError as Unreachable
from kombu.transport.memory import Channel as Memory
from kombu.transport.redis import Mutex, MutexHeld
from kombu.utils.json import dumps, loads
from redis import Redis
from redis.exceptions import RedisError

from orchestrator.compat.bridge.calls import Call, NotYet, Unreadable
from orchestrator.compat.bridge.messages import read_body, read_envelope, read_options, read_request
from orchestrator.compat.bridge.transit import Transit
from orchestrator.compat.celery.request import ARGS, MARK
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import ConfigurationError, InvalidTask, PayloadError
from orchestrator.telemetry import get_logger

log = get_logger("bridge")

Settle = Callable[[Sequence[tuple[str, bytes]]], None]
"""Settles a message whose task has ended, and sends its follow-up messages to their lists, in one atomic step."""

_RESTORE_BATCH = 1_000
_RESTORE_INTERVAL = 10.0
"""Seconds between two checks for messages of dead workers, as in kombu."""
_ERRORS = {
    "WorkerLost": exceptions.WorkerLostError,
    "orchestrator.errors.SoftTimeout": exceptions.SoftTimeLimitExceeded,
    "orchestrator.errors.TaskTimeout": exceptions.TimeLimitExceeded,
}
"""Celery's exceptions, by the equivalent error type of this package."""
_COMPAT = "orchestrator.compat.celery.exceptions"
_FAILED = "orchestrator_failed"
"""The header of an errback's message that describes the exception."""
_FIELDS = ("id", "task", "args", "kwargs", "retries", "root_id", "parent_id", "group", "eta", "expires", "timelimit")
"""Fields of the failed request that an errback gets."""
_CHORD_RETRY_PAUSE = 1.0
"""Seconds before a chord's body is sent again while Celery's Redis is down."""


class CeleryQueues:
    """Celery's queues on one Redis, and its result backend."""

    unreachable: tuple[type[Exception], ...] = (Unreachable, BackendError)

    def __init__(
        self,
        queues: Sequence[str],
        errbacks: Mapping[str, Callable[..., Any]],
        *,
        broker: str | None = None,
        results: str | None = None,
        config: str | None = None,
        namespace: str | None = None,
        restore_after: float | None = None,
    ) -> None:
        self._restore_after = restore_after
        self._restore_at = 0.0
        self._unwritten: list[tuple[Any, Any, int | None]] = []
        """Results to write: the key, the value and its time to live in seconds."""
        self._app = Celery("bridge", set_as_current=False)
        if config:
            try:
                self._app.config_from_object(config, namespace=namespace, force=True)
            except (ImportError, AttributeError) as error:
                raise ConfigurationError(f"The settings of Celery, {config}, cannot be imported: {error}.") from None
        conf = self._app.conf
        broker = broker or conf.broker_url
        if not broker:
            raise ConfigurationError("Celery's broker is not given: use --broker, or --config with its broker_url.")
        self._connection = Connection(broker, transport_options=conf.broker_transport_options)
        if self._connection.transport.driver_type != "redis":
            raise ConfigurationError(
                f"The bridge reads Celery's queues from Redis, and not from {self._connection.transport.driver_type}. "
                f"Move callers instead: both systems run side by side."
            )
        self._queues = queues = queues or [conf.task_default_queue]
        conf.update(
            broker_url="memory://",
            broker_read_url=None,
            broker_write_url=None,
            result_backend=results or conf.result_backend,
            task_default_queue=queues[0],
            task_always_eager=False,
        )
        for name, header in errbacks.items():
            self._app.register_task(type("errback", (_Errback,), {"name": name, "__header__": staticmethod(header)})())
        self.writes_results = bool(conf.result_backend)
        self._channel = self._connection.default_channel
        self.redis: Redis = Redis(connection_pool=self._channel.pool)

    def close(self) -> None:
        self._connection.release()
        self._app.close()

    def transits(self) -> list[Transit]:
        channel, prefix = self._channel, self._channel.global_keyprefix
        return [
            Transit(
                self.redis,
                queue,
                [f"{prefix}{channel._q_for_pri(queue, step)}" for step in channel.priority_steps],
                prefix,
            )
            for queue in self._queues
        ]

    # -- messages

    def read(self, message: bytes) -> Call:
        envelope = read_envelope(message)
        headers, (arguments, keywords, _) = envelope["headers"], read_body(envelope)
        retries, options = int(headers.get("retries") or 0), read_options(envelope)
        lineage = {name: headers.get(name) for name in ("id", "root_id", "parent_id", "eta", "expires", "origin")}
        request_fields = {**lineage, "retries": retries, "headers": options.get("headers", {}), "is_bridged": True}
        if failure := headers.get(_FAILED):
            request_fields["failed"] = failure
        return Call(headers["task"], arguments, keywords, options, retries, request_fields)

    def name(self, message: bytes) -> str:
        """Return the Celery id of a message's task, if there is one."""
        with suppress(Unreadable):
            return str(read_envelope(message)["headers"].get("id"))
        return "unknown"

    def has_caller(self, message: bytes) -> bool:
        """Return whether a caller may wait for the result of a message."""
        headers = read_envelope(message)["headers"]
        return self.writes_results and bool(headers.get("id")) and not headers.get("ignore_result")

    def list_of(self, queue: str, message: bytes) -> str:
        priority: Any = 0
        with suppress(Unreadable):
            priority = read_envelope(message)["properties"].get("priority")
        priority = priority if isinstance(priority, int) else 0
        return f"{self._channel.global_keyprefix}{self._channel._q_for_pri(queue, priority)}"

    # -- ends

    def succeed(self, message: bytes, value: Any, settle: Settle) -> list[tuple[str, bytes]]:
        """Write a result to Celery's result backend. Return the follow-up messages, each with its list."""
        request = self._request_of(message, settle)
        if type(value) is dict and MARK in value:
            return self._ignore(request, value[MARK], settle)
        followers: list[tuple[Any, dict[str, Any]]] = [(callback, {}) for callback in request.callbacks or ()]
        if request.chain:
            followers.append((request.chain[-1], {"chain": request.chain[:-1]}))
        lineage = {"parent_id": request.id, "root_id": request.root_id or request.id}
        for follower, options in followers:
            self._app.signature(follower).apply_async((value,), **options, **lineage)
        try:
            self._store(request, value, states.SUCCESS)
        except (EncodeError, TypeError) as error:  # Celery's workers report this the same way
            list(self._sent())
            return self._fail(request, EncodeError(str(error)), "", states.FAILURE, settle)
        if request.chord:
            self.flush()
            self._app.backend.on_chord_part_return(request, states.SUCCESS, value)
        return self._follow_ups(request, settle)

    def fail(self, message: bytes, state: str, error: TaskError | None, settle: Settle) -> list[tuple[str, bytes]]:
        request = self._request_of(message, settle)
        if state == TaskState.CANCELLED or (error and error.kind == "TaskExpired"):
            reason = "revoked" if state == TaskState.CANCELLED else "expired"
            return self._fail(request, TaskRevokedError(reason), "", states.REVOKED, settle)
        error = error or TaskError("RuntimeError", f"The task was {state}.")
        if error.kind == f"{_COMPAT}.Ignore":
            return self._ignore(request, error.attributes, settle)
        return self._fail(request, _to_celery_error(error), error.traceback, states.FAILURE, settle)

    def refuse(self, message: bytes, error: InvalidTask, settle: Settle) -> list[tuple[str, bytes]]:
        """Write the failure of a call that cannot become a task, and return the follow-up messages."""
        celery_error = (EncodeError if isinstance(error, PayloadError) else TypeError)(str(error))
        return self._fail(self._request_of(message, settle), celery_error, "", states.FAILURE, settle)

    def _ignore(self, request: Context, mark: Mapping[str, Any], settle: Settle) -> list[tuple[str, bytes]]:
        """Write the state that a task has set before it raised Ignore. There are no follow-up messages."""
        if (state := mark.get("state")) not in (None, states.IGNORED):
            self._store(request, mark.get("meta"), state)
        if request.chord:
            self.flush()
        return self._follow_ups(request, settle)

    def _fail(
        self, request: Context, error: Exception, traceback: str, state: str, settle: Settle
    ) -> list[tuple[str, bytes]]:
        self._store(request, error, state, traceback)
        if request.chord or request.chain or request.errbacks:
            self.flush()
            stores = self.writes_results and not request.ignore_result
            self._app.backend.mark_as_failure(request.id, error, traceback, request, store_result=stores, state=state)
        return self._follow_ups(request, settle)

    def _request_of(self, message: bytes, settle: Settle) -> Context:
        """Return the request of a message whose task has ended.

        Celery deletes a chord as soon as it has sent the body. So sending the body also settles the message: if the
        bridge dies afterwards, the body is sent; if it dies before, the chord is unchanged.
        """
        self._app.set_current()  # in this thread: Celery's compositions do not pass their application on
        list(self._sent())  # discard messages of a failed attempt
        request = read_request(message)
        if request.chord:
            body = request.chord = maybe_signature(request.chord, app=self._app)

            def send(*arguments: Any) -> Any:
                sent = type(body).delay(body, *arguments)
                messages = list(self._sent())
                while True:  # an error would make Celery fail the chord
                    try:
                        settle(messages)
                    except RedisError as error:
                        log.warning("bridge.chord_waits task=%s: %s", request.id, error)
                        sleep(_CHORD_RETRY_PAUSE)
                    else:
                        return sent

            body.delay = send
        return request

    def _follow_ups(self, request: Context, settle: Settle) -> list[tuple[str, bytes]]:
        """Return the messages that Celery has sent. Settle a chord member at once, so that the body is sent once.

        If another process is sending the body, or died while it did, the member waits until that claim expires.
        """
        if not request.chord:
            return list(self._sent())
        backend = self._app.backend
        if request.group and isinstance(backend, RedisBackend):
            claim, is_open = (backend.get_key_for_group(request.group, suffix) for suffix in (".c", ".s"))
            if backend.client.get(claim) not in (None, b"done") and backend.client.exists(is_open):
                raise NotYet(f"the body of chord {request.group} is being sent")
        settle(list(self._sent()))
        return []

    def _store(self, request: Context, value: Any, state: str, traceback: str = "") -> None:
        """Write a result; to Redis, with the next `flush`."""
        backend = self._app.backend
        if not self.writes_results or request.ignore_result:
            return
        if not isinstance(backend, RedisBackend):
            backend.store_result(request.id, value, state, traceback=traceback or None, request=request)
            return
        encoded = backend.encode_result(value, state)
        meta = backend._get_result_meta(encoded, state, traceback or None, request) | {"task_id": request.id}
        ttl = getattr(backend, "failure_expires", None) if state == states.FAILURE else None
        self._unwritten.append((backend.get_key_for_task(request.id), backend.encode(meta), ttl or backend.expires))

    def flush(self) -> None:
        """Write pending results."""
        if not self._unwritten:
            return
        unwritten, self._unwritten = self._unwritten, []  # if this fails, the bridge processes the ends again
        with self._app.backend.client.pipeline(transaction=False) as pipeline:
            for key, value, ttl in unwritten:
                pipeline.set(key, value, ex=ttl or None)
                pipeline.publish(key, value)
            pipeline.execute()

    def _sent(self) -> Iterator[tuple[str, bytes]]:
        """Yield the messages that Celery has sent into memory, and clear them."""
        for queue, messages in Memory.queues.items():
            with suppress(Empty):
                while message := messages.get_nowait():
                    encoded = dumps(message).encode()
                    yield self.list_of(queue, encoded), encoded

    # -- messages reserved by Celery's workers

    def reserved(self) -> int:
        """Return how many messages Celery's workers hold, or held when they died."""
        return int(self.redis.hlen(f"{self._channel.global_keyprefix}{self._channel.unacked_key}"))

    def upkeep(self) -> None:
        """Return messages to their lists that were reserved long ago, if `restore_after` is set."""
        if self._restore_after is not None and monotonic() >= self._restore_at:
            self._restore_at = monotonic() + _RESTORE_INTERVAL
            if restored := self._restore(self._restore_after):
                log.info("bridge.restored messages=%d: workers of Celery had reserved them", restored)

    def _restore(self, min_age: float) -> int:
        """Restore messages of dead workers, as kombu does."""
        channel, restored = self._channel, 0
        with channel.conn_or_acquire() as client:
            try:
                with Mutex(client, channel.unacked_mutex_key, channel.unacked_mutex_expire):
                    tags = client.zrange(
                        channel.unacked_index_key, 0, time() - min_age, byscore=True, offset=0, num=_RESTORE_BATCH
                    )
                    for tag in tags:
                        entry = client.hget(channel.unacked_key, tag)
                        _, exchange, routing_key = loads(entry) if entry else (None, "", "")
                        if entry and not channel._lookup(exchange, routing_key):
                            log.warning(
                                "bridge.unroutable exchange=%s routing_key=%s: the message stays reserved",
                                exchange,
                                routing_key,
                            )
                            continue
                        channel.qos.restore_by_tag(tag, client)
                        restored += 1
            except MutexHeld:
                pass
        return restored


class _Errback(Task):  # type: ignore[misc]
    """A Celery task that stands for an errback. Celery calls it directly; the call is sent as a message instead."""

    typing = False  # the worker of the real task checks the arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Send the arguments of Celery's call as data."""
        headers: dict[str, Any] = {}
        if len(args) > 1 and isinstance(args[0], Context) and isinstance(args[1], Exception):
            request, error, *rest = args
            description = self.backend.prepare_exception(error, "json")
            module = description["exc_module"]
            module = _COMPAT if module in ("celery.exceptions", "billiard.exceptions") else module
            message = description["exc_message"]
            headers[_FAILED] = {
                "kind": f"{module}.{description['exc_type']}".removeprefix("builtins."),
                "args": message if isinstance(message, (list, tuple)) else [message],
            }
            args = ({name: getattr(request, name, None) for name in _FIELDS}, repr(error), *rest)
        return self.apply_async(args, kwargs, headers=headers)


def _to_celery_error(error: TaskError) -> Exception:
    """Return a task's error as an instance of Celery's class for it."""
    module, _, name = error.kind.rpartition(".")
    error_class = _ERRORS.get(error.kind) or (module == _COMPAT and getattr(exceptions, name, None))
    arguments = error.attributes.get(ARGS, [error.message])
    return (error_class or create_exception_cls(name, module or "builtins"))(*arguments)  # type: ignore[no-any-return]
