"""Thousands of listeners to the HTTP API's events while tasks run; the API is killed and restarted once.

Most listen to one task each, which runs at some time in the measurement; some listen to the queue, some to the system.
The received events are compared with the enqueued tasks. `docs/performance.md` has the findings. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM = """
from orchestrator import Orchestrator

app = Orchestrator()


@app.task
def noop(number: int) -> None:
    pass
"""
OF_QUEUE, OF_SYSTEM = 10, 90
TICK = os.sysconf("SC_CLK_TCK")


class Listener:
    """Counts the events that it receives, and reconnects with the id of the last one."""

    def __init__(self, port: int, path: str, *, reads: bool = False) -> None:
        self.port, self.path, self.reads = port, path, reads
        self.last = ""
        self.kinds: Counter[str] = Counter()
        self.succeeded: Counter[str] = Counter()
        self.counted = 0
        self.connections = 0

    async def run(self) -> None:
        while "end" not in self.kinds:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._listen()
            await asyncio.sleep(0.2)

    async def _listen(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            after = f"Last-Event-ID: {self.last}\r\n" if self.last else ""
            writer.write(f"GET {self.path} HTTP/1.1\r\nHost: localhost\r\n{after}\r\n".encode())
            status = await reader.readline()
            if b" 200 " not in status:
                self.kinds[f"status {status.decode().strip()}"] += 1
                await asyncio.sleep(0.5)
                return
            self.connections += 1
            await reader.readuntil(b"\r\n\r\n")
            rest = b""
            while size := int(await reader.readline() or b"0", 16):
                rest += (await reader.readexactly(size + 2))[:-2]
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    self._receive(event)
        finally:
            writer.close()

    def _receive(self, event: bytes) -> None:
        kind = b""
        for line in event.split(b"\n"):
            if line.startswith(b"id: "):
                self.last = line[4:].decode()
            elif line.startswith(b"event: "):
                kind = line[7:]
                self.kinds[kind.decode()] += 1
            elif line.startswith(b"data: "):
                if kind == b"tasks" and self.reads:
                    self.succeeded.update(t["id"] for t in json.loads(line[6:])["tasks"] if t["status"] == "success")
                elif kind == b"tasks":
                    self.counted += line.count(b'"status":"success"')
                elif kind == b"activity":
                    self.counted += json.loads(line[6:])["queues"].get("default", {}).get("success", 0)


class Server:
    """An `orchestrator` process, with its CPU and memory usage."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        self._start = [sys.executable, "-m", "orchestrator", *arguments], folder, environment
        self.start()

    def start(self) -> None:
        arguments, folder, environment = self._start
        self.process = subprocess.Popen(arguments, cwd=folder, env=environment, stderr=(folder / "log").open("ab"))

    @property
    def cpu(self) -> float:
        return _cpu(self.process.pid)

    @property
    def memory(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(40)


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / TICK + sum(_cpu(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listeners", type=int, default=2_000)
    parser.add_argument("--rate", type=int, default=1_000, help="tasks a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    from orchestrator.embedded import EmbeddedServices
    from orchestrator.store import database

    with tempfile.TemporaryDirectory(prefix="listeners-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "load.py").write_text(PROGRAM)
        with EmbeddedServices(folder / "services") as services:
            database.upgrade(services.database_url)
            environment = os.environ | {
                "ORCHESTRATOR_DATABASE_URL": services.database_url,
                "ORCHESTRATOR_REDIS_URL": services.redis_url,
            }
            os.environ.update(environment)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            servers = {
                "scheduler": Server(folder, environment, "scheduler"),
                "worker": Server(folder, environment, "worker", "--app", "load:app", "--queues", "default,watched"),
                "api": Server(folder, environment, "api", "--port", str(port)),
            }
            sys.path.insert(0, str(folder))
            try:
                print(json.dumps(asyncio.run(measure(servers, services.redis.pid, port, options)), indent=2))
            finally:
                for server in servers.values():
                    server.stop()


async def measure(servers: dict[str, Server], redis: int, port: int, options: Any) -> dict[str, Any]:
    import load  # type: ignore[import-not-found]

    while not await _answers(port):
        await asyncio.sleep(0.1)
    found: dict[str, Any] = {"API before, MB": round(servers["api"].memory)}
    found["nobody listens"] = await _load(load, servers, redis, options)
    # The watched tasks run during the other measurements.
    watched = options.listeners - OF_QUEUE - OF_SYSTEM
    spread = [10 + options.seconds * number / watched * 2 for number in range(watched)]
    tasks = await asyncio.to_thread(
        lambda: [load.noop.options(delay=delay, queue="watched").enqueue(0).id for delay in spread]
    )
    listeners = [Listener(port, f"/api/v1/tasks/{task}/events") for task in tasks]
    queue_listeners = [Listener(port, "/api/v1/queues/default/events", reads=n == 0) for n in range(OF_QUEUE)]
    system_listeners = [Listener(port, "/api/v1/status/events") for _ in range(OF_SYSTEM)]
    all_listeners = [*queue_listeners, *system_listeners, *listeners]
    before = time.monotonic()
    running = [asyncio.create_task(listener.run()) for listener in all_listeners]
    while not all(listener.kinds["snapshot"] for listener in all_listeners):
        await asyncio.sleep(0.05)
    found["all have begun after, s"] = round(time.monotonic() - before, 1)
    found["API, MB"] = round(servers["api"].memory)
    found["all listen"] = await _load(load, servers, redis, options)
    enqueued = set(found["all listen"].pop("tasks"))

    killed = asyncio.create_task(_kill(servers["api"]))
    found["the API is killed"] = await _load(load, servers, redis, options, measured=("scheduler",))
    await killed
    enqueued |= set(found["the API is killed"].pop("tasks"))
    found["nobody listens"].pop("tasks")
    found["API after, MB"] = round(servers["api"].memory)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        set(queue_listeners[0].succeeded) == enqueued and all(listener.kinds["end"] for listener in listeners)
    ):
        await asyncio.sleep(0.2)
    await asyncio.sleep(3)
    found["came back"] = sum(listener.connections > 1 for listener in all_listeners)
    found["tasks"] = len(enqueued)
    found["missed by the listener of the queue"] = len(enqueued - set(queue_listeners[0].succeeded))
    found["told twice to it"] = sum(number - 1 for number in queue_listeners[0].succeeded.values())
    found["counted by the others"] = sorted({one.counted for one in queue_listeners[1:]})
    found["counted by those of the system"] = sorted({one.counted for one in system_listeners})
    found["ends that were heard"] = sum(listener.kinds["end"] == 1 for listener in listeners)
    found["ends to hear"] = len(listeners)
    found["events"] = dict(sum((listener.kinds for listener in all_listeners), Counter()))
    for one in running:
        one.cancel()
    return found


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _kill(api: Server) -> None:
    await asyncio.sleep(3)
    api.stop(signal.SIGKILL)
    await asyncio.sleep(1)
    api.start()


async def _load(
    load: Any, servers: dict[str, Server], redis: int, options: Any, measured: Any = None
) -> dict[str, Any]:
    """Enqueue at the rate; return the tasks, and each process's share of a core."""
    clocks = {name: servers[name].cpu for name in measured or servers} | {"redis": _cpu(redis)}
    tasks: list[str] = []
    own, began = time.process_time(), time.monotonic()
    while (now := time.monotonic() - began) < options.seconds:
        due = int(now * options.rate) - len(tasks)
        if due > 0:
            handles = await asyncio.to_thread(load.app.enqueue_many, load.noop, [(1,)] * due)
            tasks += [handle.id for handle in handles]
        await asyncio.sleep(0.02)
    elapsed = time.monotonic() - began
    after = {name: servers[name].cpu for name in measured or servers} | {"redis": _cpu(redis)}
    shares = {f"{name}, % of a core": round(100 * (after[name] - clocks[name]) / elapsed) for name in clocks}
    shares["the listeners' own process, % of a core"] = round(100 * (time.process_time() - own) / elapsed)
    return {"tasks": tasks, "tasks/s": round(len(tasks) / elapsed), **shares}


if __name__ == "__main__":
    main()
