"""Server-sent events while processes are killed, Redis loses its data, keys are revoked and listeners do not read."""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from orchestrator.transport.keys import Keys
from tests.acceptance.conftest import project
from tests.acceptance.listening import Listener, ended, enqueue, listening
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually


def test_streams_end_when_the_server_stops(stack: Stack) -> None:
    stack.scheduler()
    api = stack.api()
    with listening(f"{api}/api/v1/status/events") as listener:
        listener.begun()
        stack.processes[-1].stop()
        assert not stack.processes[-1].logged("graceful shutdown exceeded"), "no stream had to be broken off"


def restart(stack: Stack, api: str) -> Process:
    """Kill the API, and start it at the same address; return the killed process."""
    process = next(one for one in stack.processes if "api" in one.log.name and one.is_running())
    process.kill()
    stack.api(int(api.rpartition(":")[2]))
    return process


def test_listeners_miss_no_event_when_the_api_is_killed(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    stack.worker()
    root = stack.api()
    api, go = f"{root}/api/v1", tmp_path / "go"
    tasks = [enqueue(api, "narrates", str(go)) for _ in range(5)]
    with listening(f"{api}/queues/default/events") as of_queue:
        of_queue.begun()
        eventually(lambda: stack.redis.xlen(Keys().changes), "the leader knows that somebody listens")
        first = enqueue(api, "noop")
        of_queue.wait_for(lambda: first in ended(of_queue), "the leader tells what moves")
        tasks.append(first)
        snapshots = len(of_queue.of("snapshot"))
        of_tasks = [Listener(f"{api}/tasks/{task}/events").begun() for task in tasks[:5]]
        of_tasks[0].wait_for(lambda: of_tasks[0].of("log"), "a line")
        for _ in range(3):
            some = [project.add.enqueue(1, 1).id for _ in range(20)]
            restart(stack, root)
            tasks += some
        go.touch()
        for listener in of_tasks:
            listener.join()
        of_queue.wait_for(lambda: set(ended(of_queue)) >= set(tasks), "the ends of all")
    assert Counter(ended(of_queue)) == Counter(tasks), "none is missed, and none is told twice"
    assert len(of_queue.of("snapshot")) == snapshots, "it never had to begin again"
    for listener in of_tasks:
        assert [event.kind for event in listener.events].count("end") == 1
        said = [line["text"] for line in listener.of("log")]
        assert said == [text for text in ("begins", "is done") if text in said]
        assert len(listener.of("snapshot")) == 1


def test_listeners_get_the_final_state_after_redis_loses_its_data(stack: Stack, tmp_path: Path) -> None:
    stack.scheduler()
    stack.worker()
    api, go = f"{stack.api()}/api/v1", tmp_path / "go"
    task = enqueue(api, "narrates", str(go))
    listener = Listener(f"{api}/tasks/{task}/events").begun()
    listener.wait_for(lambda: listener.of("log"), "a line")
    stack.redis.flushall()
    listener.wait_for(lambda: len(listener.of("snapshot")) > 1, "another snapshot")
    go.touch()
    assert listener.join()[-1].data["status"] == "success"
    late = Listener(f"{api}/tasks/{task}/events", last=listener.events[0].id or "1-1:1-1").join()
    assert [event.kind for event in late][-1] == "end"


def test_revoking_a_key_ends_its_streams(stack: Stack) -> None:
    stack.output_of("keys", "create", "another")
    made = stack.output_of("keys", "create", "watcher", "--scope", "read")
    key = next(word for word in made.split() if word.startswith("orc_"))
    try:
        stack.scheduler()
        api = f"{stack.api()}/api/v1"
        assert httpx.get(f"{api}/status/events").status_code == 401
        with listening(f"{api}/status/events", key=key) as listener:
            listener.begun()
            stack.output_of("keys", "revoke", key.split("_")[1])
            listener.wait_for(lambda: listener.statuses[-1] == 401, "it is refused when it comes back")
    finally:
        stack.sql("DELETE FROM orchestrator.api_keys RETURNING id")


@pytest.mark.long
def test_a_listener_that_does_not_read_gets_a_new_snapshot(stack: Stack) -> None:
    stack.scheduler()
    stack.worker("--queues", "n" * 120)
    root = stack.api()
    server = next(one for one in stack.processes if "api" in one.log.name)
    host, port = root.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"GET /api/v1/queues/{'n' * 120}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        slow.settimeout(30)
        heard = bytearray(slow.recv(4096))
        before = memory(server.pid)
        for handle in [project.noop.options(queue="n" * 120).enqueue() for _ in range(10_000)]:
            handle.result(timeout=60)
        assert memory(server.pid) - before < 40_000_000
        deadline = time.monotonic() + 60
        while heard.count(b"event: snapshot") < 2 and time.monotonic() < deadline:
            heard += slow.recv(65_536)
    assert heard.startswith(b"HTTP/1.1 200")
    assert heard.count(b"event: snapshot") >= 2
    last = heard[heard.rindex(b"event: snapshot") :].split(b"\n")[1]
    assert b'"ready":0' in last
    server.signal(signal.SIGTERM)


def memory(pid: int) -> int:
    """Return a process's resident memory in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
