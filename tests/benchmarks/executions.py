"""Work outside of workers: commands by the hundred, and thousands of executions that one worker process watches.

    python -m tests.benchmarks.executions                 # all three parts, each on an empty database
    python -m tests.benchmarks.executions commands --tasks 5000

`commands`: many that run at once, and how many short ones a second. `http`: services that answer late. `pull`: somebody
who has asked for work and keeps it. Each part ends with 1 if it misses what docs/performance.md promises. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator import Handle, Orchestrator
from orchestrator.executors import ExecutorOptions, Http, Process, Pull
from tests.benchmarks.listeners import TICK, Server

PROGRAM = """
from typing import Any

from orchestrator import Orchestrator

app = Orchestrator()


@app.task
def work(**given: Any) -> Any: ...
"""
GROWTH, RATE, WATCHER = 10.0, 155.0, 150.0
"""What is promised: MB that the scheduler grows by at most, commands a second at least, MB of who watches at most."""
PATIENCE = 300.0
AT_ONCE = 32
"""Requests for work at a time."""
HANDED_IN = 64
"""Completions at a time."""


class Scene:
    """A scheduler, a worker of one process and the API on services of their own."""

    def __init__(self, stack: ExitStack, options: Any) -> None:
        from orchestrator.embedded import EmbeddedServices
        from orchestrator.store import database

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="executions-")))
        folder.chmod(0o755)
        (folder / "load.py").write_text(PROGRAM, encoding="utf-8")
        services = stack.enter_context(EmbeddedServices(folder / "services"))
        database.upgrade(services.database_url)
        environment = os.environ | {
            "ORCHESTRATOR_DATABASE_URL": services.database_url,
            "ORCHESTRATOR_REDIS_URL": services.redis_url,
            "ORCHESTRATOR_WEBHOOK_ALLOW": "127.0.0.0/8",
            "TMPDIR": str(folder),
        }
        os.environ.update(environment)
        self.port = _free_port()
        self.scheduler = self._server(stack, folder, environment, "scheduler")
        watched = str(max(1_000, options.remote))
        words = ("worker", "--app", "load:app", "--processes", "1", "--executions", watched, "--allow-command", "*")
        self.worker = self._server(stack, folder, environment, *words)
        self.api = self._server(stack, folder, environment, "api", "--port", str(self.port))
        self.app = Orchestrator()
        stack.callback(self.app.close)
        self.log = folder / "log"

    @staticmethod
    def _server(stack: ExitStack, folder: Path, environment: dict[str, str], *words: str) -> Server:
        server = Server(folder, environment, *words)
        stack.callback(server.stop)
        return server

    def enqueue(self, executor: ExecutorOptions, count: int) -> list[Handle[Any]]:
        """Enqueue so many tasks that are given their number."""
        import load  # type: ignore[import-not-found]

        task = load.work.options(executor=executor, timeout=PATIENCE)
        handles: list[Handle[Any]] = list(load.app.enqueue_many(task, [{"number": number} for number in range(count)]))
        return handles

    def memory(self) -> float:
        """Return what the process that watches takes, in MB."""
        return _resident(self.watcher)

    @property
    def watcher(self) -> int:
        """The process of the worker that runs tasks."""
        pid = self.worker.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return max(map(int, children), key=_resident)


def _resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def _until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> float:
    """Wait for something; return for how long."""
    began = time.monotonic()
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return time.monotonic() - began
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"{what}: not after {PATIENCE:g} s")
        await asyncio.sleep(0.05)


async def _ends(handles: list[Handle[Any]]) -> list[Any]:
    return await asyncio.to_thread(lambda: [handle.result(PATIENCE) for handle in handles])


async def commands(scene: Scene, options: Any) -> dict[str, Any]:
    """Run many commands at once, and then short ones one after the other."""
    await _ends(scene.enqueue(Process(command=["/bin/true"], input="file"), 50))  # everything is loaded
    before = _resident(scene.scheduler.process.pid)
    held = scene.enqueue(Process(command=["/bin/sh", "-c", "sleep 86399 & wait"], input="file"), options.commands)
    began = await _until(lambda: _sleeping() >= options.commands, "all commands run")
    found: dict[str, Any] = {"commands at once": _sleeping()}
    found["scheduler, MB more"] = round(_resident(scene.scheduler.process.pid) - before, 1)
    found |= await _held(scene, began, "running")
    for handle in held:
        handle.cancel()
    found["all are ended after, s"] = round(await _until(lambda: _sleeping() == 0, "all commands are ended"), 1)
    cpu, began = _cpus(scene), time.monotonic()
    await _ends(scene.enqueue(Process(command=["/bin/true"], input="file"), options.tasks))
    took = time.monotonic() - began
    found["short commands a second"] = round(options.tasks / took)
    found |= {
        f"{name}, ms of CPU each": round(1000 * (_cpus(scene)[name] - cpu[name]) / options.tasks, 2) for name in cpu
    }
    found["scheduler after all, MB more"] = round(_resident(scene.scheduler.process.pid) - before, 1)
    found["kept"] = found["scheduler after all, MB more"] < GROWTH and found["short commands a second"] > RATE
    return found


def _cpus(scene: Scene) -> dict[str, float]:
    commands = _of_children(scene.watcher)
    return {"scheduler": scene.scheduler.cpu, "worker": scene.worker.cpu, "the commands themselves": commands}


def _of_children(pid: int) -> float:
    """Return the seconds that children of a process have worked which have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICK


def _sleeping() -> int:
    """Return how many of our commands run, as the kernel sees them."""
    found = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += place.read_bytes() == b"sleep\x0086399\0"
        except OSError:
            continue
    return found


async def http(scene: Scene, options: Any) -> dict[str, Any]:
    """Ask a service that answers nobody before all have asked."""
    asked, go = set[int](), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            number = json.loads(await reader.readexactly(size))["input"]["number"]
            if number >= 0:
                asked.add(number)
                await go.wait()
            body = json.dumps({"result": number}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4_096)
    executor = Http(
        service="slow", url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", request_timeout=PATIENCE
    )
    handles = scene.enqueue(executor, options.remote)
    took = await _until(lambda: len(asked) == options.remote, "all have asked")
    found = await _held(scene, took, "asked")
    go.set()
    found |= await _answered(handles, options.remote)
    server.close()
    return found


class Asker:
    """One connection to the API. A client with a pool took ten milliseconds for a request, and most of all the time."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Asker:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def post(self, what: str, said: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of an answer."""
        body = json.dumps(said).encode()
        self._writer.write(
            b"POST /queue/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (what.encode(), len(body), body)
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        return int(head.split()[1]), json.loads(await self._reader.readexactly(size) or b"null")


async def pull(scene: Scene, options: Any) -> dict[str, Any]:
    """Take work, as many as there is of it, and hand it in when all is taken."""
    handles = scene.enqueue(Pull(service="slow", lease=PATIENCE), options.remote)
    taken: dict[str, int] = {}

    async def take() -> None:
        async with Asker(scene.port) as api:
            while len(taken) < options.remote:
                status, work = await api.post("poll", {"worker_id": "w", "services": ["slow"], "wait": 1})
                if status == 200:
                    taken[work["queue_id"]] = work["input"]["number"]

    began = time.monotonic()
    await asyncio.gather(*(take() for _ in range(AT_ONCE)))
    found = await _held(scene, time.monotonic() - began, "taken")
    repeated: list[int] = []

    async def hand_in(work: list[tuple[str, int]]) -> None:
        async with Asker(scene.port) as api:
            for id, number in work:
                while (status := (await api.post("complete", {"queue_id": id, "result": number}))[0]) != 200:
                    assert status in (429, 503), status
                    repeated.append(status)

    work, cpu, began = list(taken.items()), _working(scene), time.monotonic()
    handing_in = asyncio.gather(*(hand_in(work[place::HANDED_IN]) for place in range(HANDED_IN)))
    found |= await _answered(handles, options.remote)
    await handing_in
    found["all are handed in after, s"] = round(time.monotonic() - began, 1)
    found |= {
        f"{name}, ms of CPU each": round(1000 * (_working(scene)[name] - cpu[name]) / len(work), 2) for name in cpu
    }
    found["completions that were to be sent again"] = len(repeated)
    return found


def _working(scene: Scene) -> dict[str, float]:
    servers = {"API": scene.api.cpu, "worker": scene.worker.cpu, "scheduler": scene.scheduler.cpu}
    return {**servers, "the benchmark itself": time.process_time()}


async def _held(scene: Scene, took: float, what: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"all are {what} after, s": round(took, 1), "watcher, MB": round(scene.memory())}
    cpu = scene.worker.cpu
    await asyncio.sleep(10)
    found["worker while they wait, % of a core"] = round(100 * (scene.worker.cpu - cpu) / 10, 1)
    found["watcher, MB"] = max(found["watcher, MB"], round(scene.memory()))
    return found


async def _answered(handles: list[Handle[Any]], count: int) -> dict[str, Any]:
    began = time.monotonic()
    results = await _ends(handles)
    return {"all have ended after, s": round(time.monotonic() - began, 1), "right": results == list(range(count))}


PARTS: dict[str, Callable[[Scene, Any], Awaitable[dict[str, Any]]]] = {"commands": commands, "http": http, "pull": pull}


def main() -> None:
    """Measure, print, and say by the exit code whether it is what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument("--commands", type=int, default=500, help="commands that run at once")
    parser.add_argument("--tasks", type=int, default=3_000, help="short commands")
    parser.add_argument("--remote", type=int, default=2_000, help="executions that one process watches")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops what it has started
    is_kept = True
    for part in options.parts:
        with ExitStack() as stack:
            scene = Scene(stack, options)
            sys.path.insert(0, str(scene.log.parent))
            found = asyncio.run(_measure(scene, PARTS[part], options))
            sys.path.pop(0)
            sys.modules.pop("load", None)
        if "right" in found:
            found["kept"] = found["right"] and found["watcher, MB"] < WATCHER
        is_kept = is_kept and found["kept"]
        print(json.dumps({part: found}, indent=2), flush=True)
    sys.exit(0 if is_kept else 1)


async def _measure(
    scene: Scene, part: Callable[[Scene, Any], Awaitable[dict[str, Any]]], options: Any
) -> dict[str, Any]:
    await _until(
        lambda: "service.ready" in scene.log.read_text() and "process.ready" in scene.log.read_text(), "all are ready"
    )
    return await part(scene, options)


if __name__ == "__main__":
    main()
