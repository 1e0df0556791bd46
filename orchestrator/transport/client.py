"""The client's side: nudge the leader, and hear of tasks and runs that ended."""

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
"""Seconds that one nudge may take."""
_SHORTEST = 0.01
"""Seconds for a connection where no time is left; none at all would mean not to wait for what is there."""
_LONGEST = 60.0
"""Seconds to wait for another nudge: each takes much less."""
_SILENCE = 2.0
"""Seconds without nudges after one that failed."""

_MOST_ANSWERS = 65_536
"""Bytes of answers to nudges that are read at once."""
_READ_EVERY = 0.005
"""Seconds between two looks for answers while one nudge follows another: Redis has just been there."""
_CONFIRMED = 1.0
"""Seconds to wait until Redis has confirmed a subscription."""
_FRESH = 60.0
"""Seconds after which a signed announcement may be a replay: then Postgres is asked."""
_REFUSE_EVERY = 10.0
"""Seconds between two forged announcements that a client sets aside."""

Wake = Callable[["Ended | None"], None]
"""Called with the end that was announced, or with None: something may have been missed, look in Postgres."""


def nudge(redis: Redis, keys: Keys) -> bool:
    """Wake the leader; say whether it worked. If not, its safety scan finds the work a little later.

    The work is committed already, so no error of Redis may reach the caller.
    """
    try:
        redis.xadd(keys.nudges, {"new": b""}, maxlen=NUDGE_CAP, approximate=True)
    except UNAVAILABLE:
        return False
    return True


class Nudges:
    """The nudges of a client's process. The answer to one is read when the next is sent.

    After one that failed there are none for a while, so that no caller is held up.
    """

    def __init__(self, url: str, keys: Keys) -> None:
        self._redis = connect(url, timeout=_TIMEOUT)
        words = ("XADD", keys.nudges, "MAXLEN", "~", NUDGE_CAP, "*")
        self._commands = [packed((*words, *fields))[0] for fields in (("new", b""), READY_TASK)]
        self._read_at = 0.0
        self._lock = threading.RLock()
        self._is_sending = False
        self._once_more = False
        self._connection: Any = None
        self._silent_until = 0.0
        self._are_whole = True
        """The answers that were read last did not end in the middle of one."""

    def send(self, *, is_task: bool = False) -> None:
        """Wake the leader, if Redis can be used; if it `is_task`, only for tasks that can be claimed at once."""
        now = time.monotonic()
        if now < self._silent_until:
            return
        if not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=time_limits.left(_LONGEST))):
            return  # Redis hangs, and its leader looks by itself
        try:
            if self._is_sending:
                self._once_more = True  # a signal handler has interrupted one that may have left already
                return
            if time.monotonic() < self._silent_until:
                return  # the thread that had the lock has found out
            self._is_sending = True
            try:
                self._send(self._commands[is_task], now)
                while self._once_more:
                    self._once_more = False
                    self._send(self._commands[0], now)
            except UNAVAILABLE:
                self._silent_until = time.monotonic() + _SILENCE
                self._connection.disconnect()  # and forget the answers that are still to come
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
                self._read_at = now + _READ_EVERY
                self._read_answers()
            self._connect().sendall(command)
        except (ConnectionError, BrokenPipeError, ConnectionResetError):
            if not is_open:
                raise
            self._connection.disconnect()  # Redis has closed it meanwhile
            self._connect().sendall(command)

    def _connect(self) -> Any:
        """Return the socket, connected."""
        if self._connection._sock is None:
            self._are_whole = True
            seconds = time_limits.left(_TIMEOUT) or _SHORTEST
            self._connection.socket_timeout = self._connection.socket_connect_timeout = seconds
            self._connection.connect()
        return self._connection._sock

    def _read_answers(self) -> None:
        """Read what has come so far. Only an error counts, and that the connection is closed: the driver would look
        for each of them, and parse each answer, which takes longer than to send a nudge."""
        line = self._connection._sock
        if line is None or isinstance(line, SSLSocket):
            while self._connection.can_read(0):
                self._connection.read_response()
            return
        while True:
            try:
                answers = os.read(line.fileno(), _MOST_ANSWERS)  # `recv` would wait: the socket has a timeout
            except BlockingIOError:
                return  # there is nothing more
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not answers:
                raise ConnectionError("Redis has closed the connection.")
            is_error = (answers.startswith(b"-") and self._are_whole) or b"\r\n-" in answers
            self._are_whole = answers.endswith(b"\r\n")
            if is_error:
                raise ResponseError("Redis refuses nudges.")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.disconnect()
        self._redis.close()


class Announcements:
    """Waits on Redis pub/sub, in one thread, for all waits of a process.

    It only makes waits faster: waiters subscribe, then read Postgres, and read again whenever the connection was lost.
    The thread alone connects, and holds no lock meanwhile, so a Redis that hangs blocks no other thread for long.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._lock = threading.Lock()
        self._waiters: dict[bytes, list[Wake]] = {}
        self._subscribed: dict[str, threading.Event] = {}
        self._pubsub = redis.pubsub()  # type: ignore[no-untyped-call]
        self._line: Any = None
        """The socket of the connection, while that stands."""
        self._thread: threading.Thread | None = None
        self._poll, self._polled = select.poll(), None
        """What waits for messages, and the socket that it looks at."""
        self._refuse_at = 0.0
        self._closed = threading.Event()

    def listen(self, identifier: bytes, wake: Wake) -> None:
        """Call `wake` from now on when this id ends; returns once the subscription stands (or Redis is away)."""
        channel = self._keys.done(identifier)
        with self._lock:
            confirmed = self._add(identifier, channel, wake)
        if not confirmed.is_set():
            confirmed.wait(time_limits.left(_CONFIRMED))

    def listen_all(self, identifiers: Iterable[bytes], wake: Wake) -> None:
        """Do the same for many ids."""
        awaited: dict[str, threading.Event] = {}
        with self._lock:
            for identifier in identifiers:
                channel = self._keys.done(identifier)
                awaited[channel] = self._add(identifier, channel, wake)
        give_up_at = time.monotonic() + time_limits.left(_CONFIRMED)
        for confirmed in awaited.values():
            if not confirmed.is_set():
                confirmed.wait(max(0.0, give_up_at - time.monotonic()))

    def _add(self, identifier: bytes, channel: str, wake: Wake) -> threading.Event:
        """Note a wait, with the lock held; return the event that says that the subscription stands."""
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
        """End the thread, which is not waited for for long, and its connection."""
        self._closed.set()
        with self._lock:
            self._send("UNSUBSCRIBE")  # its confirmation wakes the thread
        if self._thread is not None:
            self._thread.join(2.0)  # where Redis hangs, it ends a little later

    def _send(self, *words: str) -> None:
        """Send a command to Redis, with the lock held, if the connection stands; otherwise the thread sends it
        later."""
        line = self._line
        if line is None:
            return
        try:
            line.sendall(b"".join(packed(words)))
        except OSError:
            self._line = None  # half of it may be sent: the thread finds the line broken, and connects anew
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            with contextlib.suppress(*UNAVAILABLE):
                self._subscribe()
            self._listen()
            self._pubsub.close()
        except Exception:
            if not self._closed.is_set():  # else its connection was closed under it, which the driver does not expect
                raise

    def _listen(self) -> None:
        pause = 0.05
        while not self._closed.is_set():
            try:
                message = self._next(1.0)
            except UNAVAILABLE:
                with self._lock:
                    self._line = None
                self._closed.wait(pause)
                pause = min(pause * 2, 2.0)
                with contextlib.suppress(*UNAVAILABLE):
                    self._pubsub.connection and self._pubsub.connection.disconnect()
                    self._subscribe()
                self._wake_everyone()
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
        """Return the next message, or None if there is none for so long. The driver's way to it is twenty calls."""
        connection = self._pubsub.connection
        line = connection and connection._sock
        if line is None:
            raise ConnectionError("Not connected.")
        is_here = connection._parser._reader.has_data() or (isinstance(line, SSLSocket) and line.pending() > 0)
        if not is_here:
            if line is not self._polled:
                self._poll = select.poll()
                self._poll.register(line, select.POLLIN)
                self._polled = line
            if not self._poll.poll(1000 * seconds):
                return None
        message: list[Any] = connection.read_response()
        return message

    def _subscribe(self) -> None:
        """Connect, and subscribe to all channels with listeners."""
        with self._lock:
            wanted = set(self._subscribed)
        self._pubsub.subscribe(*wanted)
        with self._lock:
            self._line = self._pubsub.connection._sock
            if others := set(self._subscribed) - wanted:  # these came meanwhile
                self._send("SUBSCRIBE", *others)

    def _subscribe_missing(self) -> None:
        """Subscribe to channels whose listeners came while Redis was away."""
        with self._lock:
            missing = [channel for channel, confirmed in self._subscribed.items() if not confirmed.is_set()]
            if missing:
                self._send("SUBSCRIBE", *missing)
        if missing and self._line is None:
            with contextlib.suppress(*UNAVAILABLE):
                self._subscribe()

    def _deliver(self, channel: str, data: bytes) -> None:
        try:
            checked = self._keys.signing.check(channel, data)
            ended = decode(list[Ended], checked.body)
        except Malformed as error:
            self._refuse(channel, data, error)
            return  # not our message; Postgres is the truth
        is_old = bool(checked.mac) and abs(time.time() - checked.stamp / 1000) > _FRESH
        for item in ended:
            with self._lock:
                waiting = list(self._waiters.get(item.id, ()))
            for wake in waiting:
                wake(None if is_old else item)

    def _refuse(self, channel: str, data: bytes, error: Malformed) -> None:
        """Set a forged message aside; one now and then is enough, for every client hears it."""
        if isinstance(error, Forged) and time.monotonic() >= self._refuse_at:
            self._refuse_at = time.monotonic() + _REFUSE_EVERY
            with contextlib.suppress(*UNAVAILABLE):
                pipeline = self._redis.pipeline(transaction=False)
                set_aside(pipeline, self._keys, [Refused(channel, data, str(error))])
                pipeline.execute()

    def _wake_everyone(self) -> None:
        with self._lock:
            waiting = [wake for wakes in self._waiters.values() for wake in wakes]
        for wake in waiting:
            wake(None)
