"""The client's side of Redis: nudge the leader, and wait for tasks and runs to end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from ssl import SSLSocket
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError, ResponseError

from orchestrator import time_limits
from orchestrator.transport.codec import Ended, Malformed, decode
from orchestrator.transport.connection import UNAVAILABLE, connect, packed
from orchestrator.transport.keys import NUDGE_CAP, READY_TASK, Keys
from orchestrator.transport.quarantine import Refused, set_aside
from orchestrator.transport.signing import Forged

_TIMEOUT = 2.0
"""The timeout of one nudge, in seconds."""
_MIN_CONNECT_SECONDS = 0.01
"""Seconds to connect if the caller has no time left; 0 would mean no waiting at all, even for data that is there."""
_LOCK_TIMEOUT = 60.0
"""Seconds to wait for the lock while another thread sends its nudge, which takes much less."""
_FAILURE_PAUSE = 2.0
"""Seconds without nudges after a failed one."""

_READ_SIZE = 65_536
_READ_INTERVAL = 0.005
"""Seconds between two reads of replies while nudges follow each other: Redis has just been reachable."""
_SUBSCRIBE_TIMEOUT = 1.0
"""Seconds to wait until Redis has confirmed a subscription."""
_MAX_AGE = 60.0
"""The age in seconds beyond which a signed announcement may be a replay; the waiter then reads Postgres."""
_QUARANTINE_INTERVAL = 10.0
"""Seconds between two forged announcements that a client quarantines."""

Wake = Callable[["Ended | None"], None]
"""Called with the announced end, or with None if an announcement may have been missed: then read Postgres."""


def nudge(redis: Redis, keys: Keys) -> bool:
    """Wake the leader; return whether that worked. If not, the leader's safety scan finds the work a little later."""
    try:
        redis.xadd(keys.nudges, {"new": b""}, maxlen=NUDGE_CAP, approximate=True)
    except UNAVAILABLE:
        return False
    return True


class Nudges:
    """Sends the nudges of a client process. The reply to a nudge is read when the next nudge is sent.

    After a failed nudge, `send` does nothing for a while, so that no caller is delayed.
    """

    def __init__(self, url: str, keys: Keys) -> None:
        self._redis = connect(url, timeout=_TIMEOUT)
        command = ("XADD", keys.nudges, "MAXLEN", "~", NUDGE_CAP, "*")
        self._commands = [packed((*command, *fields))[0] for fields in (("new", b""), READY_TASK)]
        self._read_at = 0.0
        self._lock = threading.RLock()
        self._is_sending = False
        self._has_pending = False
        self._connection: Any = None
        self._paused_until = 0.0
        self._ends_complete = True
        """Whether the replies read last ended with a complete line."""

    def send(self, *, is_task: bool = False) -> None:
        """Wake the leader if Redis is available. With `is_task`, the leader only claims ready tasks."""
        now = time.monotonic()
        if now < self._paused_until:
            return
        if not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=time_limits.remaining(_LOCK_TIMEOUT))):
            return  # Redis hangs, and the leader scans on its own
        try:
            if self._is_sending:
                self._has_pending = True  # a signal handler interrupted a nudge that may already be sent
                return
            if time.monotonic() < self._paused_until:
                return  # the thread that had the lock has just failed
            self._is_sending = True
            try:
                self._send(self._commands[is_task], now)
                while self._has_pending:
                    self._has_pending = False
                    self._send(self._commands[0], now)
            except UNAVAILABLE:
                self._paused_until = time.monotonic() + _FAILURE_PAUSE
                self._connection.disconnect()  # this also drops the pending replies
            finally:
                self._is_sending = False
        finally:
            self._lock.release()

    def _send(self, command: bytes, now: float) -> None:
        if self._connection is None:
            self._connection = self._redis.connection_pool.make_connection()
        is_open = self._connection._sock is not None
        try:
            if is_open and now >= self._read_at:
                self._read_at = now + _READ_INTERVAL
                self._read_replies()
            self._connect().sendall(command)
        except (ConnectionError, BrokenPipeError, ConnectionResetError):
            if not is_open:
                raise
            self._connection.disconnect()  # Redis closed it in the meantime
            self._connect().sendall(command)

    def _connect(self) -> Any:
        if self._connection._sock is None:
            self._ends_complete = True
            seconds = time_limits.remaining(_TIMEOUT) or _MIN_CONNECT_SECONDS
            self._connection.socket_timeout = self._connection.socket_connect_timeout = seconds
            self._connection.connect()
        return self._connection._sock

    def _read_replies(self) -> None:
        """Read the replies that have arrived, to detect an error or a closed connection. The driver would poll and
        parse each reply, which takes longer than sending a nudge."""
        sock = self._connection._sock
        if sock is None or isinstance(sock, SSLSocket):
            while self._connection.can_read(0):
                self._connection.read_response()
            return
        while True:
            try:
                replies = os.read(sock.fileno(), _READ_SIZE)  # `recv` would block: the socket has a timeout
            except BlockingIOError:
                return  # no more data
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not replies:
                raise ConnectionError("Redis has closed the connection.")
            is_error = (replies.startswith(b"-") and self._ends_complete) or b"\r\n-" in replies
            self._ends_complete = replies.endswith(b"\r\n")
            if is_error:
                raise ResponseError("Redis rejects the wake-up messages (nudges).")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.disconnect()
        self._redis.close()


class Announcements:
    """Waits for the ends of tasks and runs on Redis pub/sub, in one thread for all waiters of a process.

    Announcements only make waits faster: a waiter subscribes, reads Postgres, and reads it again whenever the
    connection was lost. Only the thread connects, and it holds no lock while it does: a Redis that hangs blocks no
    other thread for long.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._lock = threading.Lock()
        self._waiters: dict[bytes, list[Wake]] = {}
        self._subscribed: dict[str, threading.Event] = {}
        self._pubsub = redis.pubsub()  # type: ignore[no-untyped-call]
        self._sock: Any = None
        """The socket of the connection while it is usable."""
        self._thread: threading.Thread | None = None
        self._poll, self._polled_socket = select.poll(), None
        """The poll object that waits for messages, and the socket registered with it."""
        self._refuse_at = 0.0
        self._closed = threading.Event()

    def listen(self, identifier: bytes, wake: Wake) -> None:
        """Call `wake` when this task or run ends. Return once the subscription is confirmed (or Redis is down)."""
        channel = self._keys.done(identifier)
        with self._lock:
            confirmed = self._add(identifier, channel, wake)
        if not confirmed.is_set():
            confirmed.wait(time_limits.remaining(_SUBSCRIBE_TIMEOUT))

    def listen_all(self, identifiers: Iterable[bytes], wake: Wake) -> None:
        """Call `wake` when any of these tasks or runs ends."""
        awaited: dict[str, threading.Event] = {}
        with self._lock:
            for identifier in identifiers:
                channel = self._keys.done(identifier)
                awaited[channel] = self._add(identifier, channel, wake)
        give_up_at = time.monotonic() + time_limits.remaining(_SUBSCRIBE_TIMEOUT)
        for confirmed in awaited.values():
            if not confirmed.is_set():
                confirmed.wait(max(0.0, give_up_at - time.monotonic()))

    def _add(self, identifier: bytes, channel: str, wake: Wake) -> threading.Event:
        """Add a waiter, with the lock held. Return the event of the confirmed subscription."""
        self._waiters.setdefault(identifier, []).append(wake)
        confirmed = self._subscribed.get(channel)
        if confirmed is None:
            confirmed = self._subscribed[channel] = threading.Event()
            self._send("SUBSCRIBE", channel)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="orchestrator-announcements", daemon=True)
            self._thread.start()
        return confirmed

    def forget(self, identifier: bytes, wake: Wake) -> None:
        """Stop calling `wake`."""
        with self._lock:
            waiting = self._waiters.get(identifier, [])
            if wake in waiting:
                waiting.remove(wake)
            if not waiting:
                self._waiters.pop(identifier, None)

    def close(self) -> None:
        """Close the connection and stop the thread, waiting for it only briefly."""
        self._closed.set()
        with self._lock:
            self._send("UNSUBSCRIBE")  # its confirmation wakes the thread
        if self._thread is not None:
            self._thread.join(2.0)  # if Redis hangs, it ends a little later

    def _send(self, *command: str) -> None:
        """Send a command, with the lock held, if the connection is usable; otherwise the thread sends it later."""
        sock = self._sock
        if sock is None:
            return
        try:
            sock.sendall(b"".join(packed(command)))
        except OSError:
            self._sock = None  # half of it may be sent: the thread finds the socket broken and reconnects
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            with contextlib.suppress(*UNAVAILABLE):
                self._subscribe()
            self._listen()
            self._pubsub.close()
        except Exception:
            if not self._closed.is_set():  # else it was closed during a read, which the driver does not expect
                raise

    def _listen(self) -> None:
        pause = 0.05
        while not self._closed.is_set():
            try:
                message = self._next(1.0)
            except UNAVAILABLE:
                with self._lock:
                    self._sock = None
                self._closed.wait(pause)
                pause = min(pause * 2, 2.0)
                with contextlib.suppress(*UNAVAILABLE):
                    self._pubsub.connection and self._pubsub.connection.disconnect()
                    self._subscribe()
                self._wake_all()
                continue
            if message is None:
                self._subscribe_missing()
                continue
            pause = 0.05
            kind, channel, *data = message
            if kind == b"subscribe":
                self._subscribed[channel.decode()].set()
            elif kind == b"message":
                self._deliver(channel.decode(), data[0])

    def _next(self, seconds: float) -> list[Any] | None:
        """Return the next message, or None if none arrives within `seconds`. The driver needs twenty calls for that."""
        connection = self._pubsub.connection
        sock = connection and connection._sock
        if sock is None:
            raise ConnectionError("Not connected.")
        is_here = connection._parser._reader.has_data() or (isinstance(sock, SSLSocket) and sock.pending() > 0)
        if not is_here:
            if sock is not self._polled_socket:
                self._poll = select.poll()
                self._poll.register(sock, select.POLLIN)
                self._polled_socket = sock
            if not self._poll.poll(1000 * seconds):
                return None
        message: list[Any] = connection.read_response()
        return message

    def _subscribe(self) -> None:
        with self._lock:
            channels = set(self._subscribed)
        self._pubsub.subscribe(*channels)
        with self._lock:
            self._sock = self._pubsub.connection._sock
            if added := set(self._subscribed) - channels:  # added while connecting
                self._send("SUBSCRIBE", *added)

    def _subscribe_missing(self) -> None:
        """Subscribe to channels whose listeners were added while Redis was down."""
        with self._lock:
            missing = [channel for channel, confirmed in self._subscribed.items() if not confirmed.is_set()]
            if missing:
                self._send("SUBSCRIBE", *missing)
        if missing and self._sock is None:
            with contextlib.suppress(*UNAVAILABLE):
                self._subscribe()

    def _deliver(self, channel: str, data: bytes) -> None:
        try:
            checked = self._keys.signing.check(channel, data)
            ended = decode(list[Ended], checked.body)
        except Malformed as error:
            self._refuse(channel, data, error)
            return  # a foreign message; the truth is in Postgres
        is_old = bool(checked.mac) and abs(time.time() - checked.stamp / 1000) > _MAX_AGE
        for item in ended:
            with self._lock:
                waiting = list(self._waiters.get(item.id, ()))
            for wake in waiting:
                wake(None if is_old else item)

    def _refuse(self, channel: str, data: bytes, error: Malformed) -> None:
        """Quarantine a forged message. One now and then is enough, because every client receives it."""
        if isinstance(error, Forged) and time.monotonic() >= self._refuse_at:
            self._refuse_at = time.monotonic() + _QUARANTINE_INTERVAL
            with contextlib.suppress(*UNAVAILABLE):
                pipeline = self._redis.pipeline(transaction=False)
                set_aside(pipeline, self._keys, [Refused(channel, data, str(error))])
                pipeline.execute()

    def _wake_all(self) -> None:
        with self._lock:
            waiting = [wake for wakes in self._waiters.values() for wake in wakes]
        for wake in waiting:
            wake(None)
