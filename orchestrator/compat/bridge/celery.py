"""Celery's messages on Redis, as kombu writes them, and what Celery does when a task has ended.

Celery's own code writes results and sends what follows (chains, callbacks, chords), so that both are as its clients
expect. It sends into memory here: the bridge moves those messages to Redis in the step that settles the task.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty
from time import monotonic, sleep, time
from typing import Any

from celery import Celery, maybe_signature, states
from celery.app.task import Context
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendError, TaskRevokedError
from celery.utils.serialization import create_exception_cls
from kombu import Connection
from kombu.compression import decompress
from kombu.exceptions import ContentDisallowed, EncodeError, SerializationError
from kombu.exceptions import OperationalError as Unreachable
from kombu.serialization import loads as load_body
from kombu.transport.memory import Channel as Memory
from kombu.transport.redis import Mutex, MutexHeld
from kombu.utils.json import dumps, loads
from redis import Redis
from redis.exceptions import RedisError

from orchestrator.compat.bridge.calls import Call, NotYet, Unreadable
from orchestrator.compat.bridge.transit import Transit
from orchestrator.compat.celery.request import ARGS
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import ConfigurationError
from orchestrator.telemetry import get_logger

log = get_logger("bridge")

Settle = Callable[[Sequence[tuple[str, bytes]]], None]
"""Forgets a message whose task has ended, and sends those that follow it to their lists, in one step."""

_ACCEPTED = {"application/json", "application/x-msgpack"}
_RESTORED_AT_ONCE = 1_000
_OWN_HEADERS = {"lang", "task", "id", "shadow", "eta", "expires", "group", "root_id", "parent_id", "argsrepr"} | {
    *("kwargsrepr", "origin", "compression"),
}
"""Texts among the headers that Celery itself has put there."""
_RESTORE_EVERY = 10.0
"""Seconds between two looks for messages of dead workers, as in kombu."""
_PAUSE = 1.0
"""Seconds before a chord's body is sent again while Celery's Redis is away."""


class CeleryQueues:
    """Celery's queues on one Redis, and its results."""

    unreachable: tuple[type[Exception], ...] = (Unreachable, BackendError)

    def __init__(
        self,
        queues: Sequence[str],
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
        """Results, by their keys, and for how many seconds they are kept."""
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
        self.writes_results = bool(conf.result_backend)
        self._channel = self._connection.default_channel
        self.redis: Redis = Redis(connection_pool=self._channel.pool)

    def close(self) -> None:
        """Close all connections."""
        self._connection.release()
        self._app.close()

    def transits(self) -> list[Transit]:
        """Return the ways of the queues' messages."""
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
        """Return what a message asks for."""
        envelope = _envelope(message)
        headers, (arguments, keywords, _) = envelope["headers"], _body(envelope)
        retries, options = int(headers.get("retries") or 0), _options(envelope)
        lineage = {name: headers.get(name) for name in ("id", "root_id", "parent_id", "eta", "expires", "origin")}
        beside = {**lineage, "retries": retries, "headers": options.get("headers", {})}
        return Call(headers["task"], arguments, keywords, options, retries, beside)

    def name(self, message: bytes) -> str:
        """Return the id of a message's task in Celery, if there is one."""
        with suppress(Unreadable):
            return str(_envelope(message)["headers"].get("id"))
        return "unknown"

    def list_of(self, queue: str, message: bytes) -> str:
        """Return the list where a message belongs."""
        priority: Any = 0
        with suppress(Unreadable):
            priority = _envelope(message)["properties"].get("priority")
        priority = priority if isinstance(priority, int) else 0
        return f"{self._channel.global_keyprefix}{self._channel._q_for_pri(queue, priority)}"

    # -- ends

    def succeed(self, message: bytes, value: Any, settle: Settle) -> list[tuple[str, bytes]]:
        """Write a result where callers of Celery look for it; return the messages that follow, and their lists."""
        request = self._ended(message, settle)
        followers: list[tuple[Any, dict[str, Any]]] = [(one, {}) for one in request.callbacks or ()]
        if request.chain:
            followers.append((request.chain[-1], {"chain": request.chain[:-1]}))
        lineage = {"parent_id": request.id, "root_id": request.root_id or request.id}
        for follower, more in followers:
            self._app.signature(follower).apply_async((value,), **more, **lineage)
        try:
            self._store(request, value, states.SUCCESS)
        except (EncodeError, TypeError) as error:  # which Celery's workers report the same way
            list(self._sent())
            return self._fail(request, EncodeError(str(error)), "", states.FAILURE, settle)
        if request.chord:
            self.flush()
            self._app.backend.on_chord_part_return(request, states.SUCCESS, value)
        return self._follow_ups(request, settle)

    def fail(self, message: bytes, state: str, error: TaskError | None, settle: Settle) -> list[tuple[str, bytes]]:
        """Do the same for a task that has not succeeded."""
        request = self._ended(message, settle)
        if state == TaskState.CANCELLED or (error and error.kind == "TaskExpired"):
            reason = "revoked" if state == TaskState.CANCELLED else "expired"
            return self._fail(request, TaskRevokedError(reason), "", states.REVOKED, settle)
        error = error or TaskError("RuntimeError", f"The task was {state}.")
        module, _, name = error.kind.rpartition(".")
        arguments = error.attributes.get(ARGS, [error.message])
        raised = create_exception_cls(name, module or "builtins")(*arguments)
        return self._fail(request, raised, error.traceback, states.FAILURE, settle)

    def _fail(
        self, request: Context, error: Exception, traceback: str, state: str, settle: Settle
    ) -> list[tuple[str, bytes]]:
        self._store(request, error, state, traceback)
        if request.chord or request.chain or request.errbacks:
            self.flush()
            stores = self.writes_results and not request.ignore_result
            self._app.backend.mark_as_failure(request.id, error, traceback, request, store_result=stores, state=state)
        return self._follow_ups(request, settle)

    def _ended(self, message: bytes, settle: Settle) -> Context:
        """Return the request of a message whose task has ended.

        Celery forgets a chord as soon as it has sent the body. So that step settles the message, too: a bridge that
        dies afterwards has sent the body, and one that dies before leaves the chord as it was.
        """
        list(self._sent())  # of one that failed
        request = _request(message)
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
                        sleep(_PAUSE)
                    else:
                        return sent

            body.delay = send
        return request

    def _follow_ups(self, request: Context, settle: Settle) -> list[tuple[str, bytes]]:
        """Return what Celery has sent. A part of a chord is settled at once: repeated, it could send the body again.

        If another process is sending the body, or died while it did, the part waits until that one's claim is over.
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
        """Write one result; where they are in Redis, with the next `flush`."""
        backend = self._app.backend
        if not self.writes_results or request.ignore_result:
            return
        if not isinstance(backend, RedisBackend):
            backend.store_result(request.id, value, state, traceback=traceback or None, request=request)
            return
        encoded = backend.encode_result(value, state)
        meta = backend._get_result_meta(encoded, state, traceback or None, request) | {"task_id": request.id}
        lasting = getattr(backend, "failure_expires", None) if state == states.FAILURE else None
        self._unwritten.append((backend.get_key_for_task(request.id), backend.encode(meta), lasting or backend.expires))

    def flush(self) -> None:
        """Write what is not written yet."""
        if not self._unwritten:
            return
        unwritten, self._unwritten = self._unwritten, []  # if this fails, all of them are asked for again
        with self._app.backend.client.pipeline(transaction=False) as pipeline:
            for key, value, lasting in unwritten:
                pipeline.set(key, value, ex=lasting or None)
                pipeline.publish(key, value)
            pipeline.execute()

    def _sent(self) -> Iterator[tuple[str, bytes]]:
        """Yield what Celery has sent into memory meanwhile, and forget it."""
        for queue, messages in Memory.queues.items():
            with suppress(Empty):
                while message := messages.get_nowait():
                    encoded = dumps(message).encode()
                    yield self.list_of(queue, encoded), encoded

    # -- messages that a worker of Celery has reserved

    def reserved(self) -> int:
        """Return how many messages workers of Celery hold, or held when they died."""
        return int(self.redis.hlen(f"{self._channel.global_keyprefix}{self._channel.unacked_key}"))

    def upkeep(self) -> None:
        """Give messages back to their lists that were reserved long ago, if that is wanted."""
        if self._restore_after is not None and monotonic() >= self._restore_at:
            self._restore_at = monotonic() + _RESTORE_EVERY
            if restored := self._restore(self._restore_after):
                log.info("bridge.restored messages=%d: workers of Celery had reserved them", restored)

    def _restore(self, after: float) -> int:
        """Do what kombu does for workers that died."""
        channel, restored = self._channel, 0
        with channel.conn_or_acquire() as client:
            try:
                with Mutex(client, channel.unacked_mutex_key, channel.unacked_mutex_expire):
                    tags = client.zrange(
                        channel.unacked_index_key, 0, time() - after, byscore=True, offset=0, num=_RESTORED_AT_ONCE
                    )
                    for tag in tags:
                        kept = client.hget(channel.unacked_key, tag)
                        _, exchange, routing_key = loads(kept) if kept else (None, "", "")
                        if kept and not channel._lookup(exchange, routing_key):
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


def _envelope(message: bytes) -> Mapping[str, Any]:
    try:
        envelope = loads(message)
        headers, properties = envelope["headers"], envelope["properties"]
        if isinstance(headers, dict) and isinstance(properties, dict) and isinstance(envelope["body"], str):
            if not isinstance(headers.get("task"), str):
                raise Unreadable("it has no task in its headers, as in the first version of Celery's protocol")
            return envelope  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise Unreadable("it is not a message of kombu")


def _body(envelope: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return a call's arguments, its keywords, and what else it has: callbacks, chain and chord."""
    kind = envelope.get("content-type")
    if kind not in _ACCEPTED:
        raise Unreadable(f"its content type is {kind}; the bridge reads JSON and msgpack, and no pickle")
    try:
        body: Any = envelope["body"]
        if envelope["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body)
        if compression := envelope["headers"].get("compression"):
            body = decompress(body, compression)
        arguments, keywords, embedded = load_body(body, kind, envelope.get("content-encoding"), accept=_ACCEPTED)
    except (ContentDisallowed, SerializationError, KeyError, ValueError, TypeError, binascii.Error, OSError) as error:
        raise Unreadable(f"its body cannot be read: {error}") from None
    if not (isinstance(arguments, list) and isinstance(keywords, dict) and isinstance(embedded, dict)):
        raise Unreadable("its body is not a list of arguments, keywords and callbacks")
    return arguments, keywords, embedded


def _options(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a message says about how its task runs, as options of ours."""
    headers, options = envelope["headers"], dict[str, Any]()
    eta, expires = _moment(headers.get("eta")), _moment(headers.get("expires"))
    if eta is not None and eta > datetime.now(UTC):
        options["eta"] = eta
    if expires is not None:
        options["expires"] = expires
    hard, soft = [*(headers.get("timelimit") or ()), None, None][:2]
    if hard:
        options["timeout"] = hard
    if soft and not (hard and soft >= hard):
        options["soft_timeout"] = soft
    if priority := envelope["properties"].get("priority"):
        options["priority"] = max(-100, -priority)  # on Redis, Celery's 0 goes first
    own = {name: value for name, value in headers.items() if name not in _OWN_HEADERS and isinstance(value, str)}
    if own:
        options["headers"] = own
    return options


def _moment(text: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if text else None
    except (ValueError, TypeError):
        raise Unreadable(f"its time {text!r} cannot be read") from None
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


def _request(message: bytes) -> Context:
    """Return a message as Celery's code knows the task that it runs."""
    envelope = _envelope(message)
    arguments, keywords, embedded = _body(envelope)
    delivery = envelope["properties"].get("delivery_info") or {}
    return Context(envelope["headers"], args=arguments, kwargs=keywords, delivery_info=delivery, **embedded)
