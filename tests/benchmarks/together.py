"""Enqueues that come at the same time: over HTTP, from coroutines, and one by one; for one or more checkouts.

CPU time by process says more than rates do on a machine that others use too. The checkouts take turns, each turn has a
database of its own, and the best figure of all rounds is shown, because others can only spoil it. A scheduler and a
worker run the tasks meanwhile, unless the name of a case says otherwise. `docs/performance.md` holds the findings.
Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
APPLICATION = """
from orchestrator import Orchestrator

app = Orchestrator()


@app.task(name="noop")
def noop(value: int) -> int:
    return 1
"""
BODY = '{"name":"noop","args":[1]}'
PARTS = ("client", "api", "postgres", "redis", "scheduler", "worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[REPOSITORY])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=10_000, help="tasks of a case; a tenth of it one by one")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose names hold this")
    parser.add_argument("--client", nargs=2, metavar=("CASE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        what, address = options.client
        measure(what, address, options.size)
    else:
        compare(options.checkouts, options.rounds, options.size, options.only)


CASES = {
    "HTTP, 50 clients": ("http", 1.0, ("scheduler", "worker", "api")),
    "HTTP, each with its own key": ("keys", 1.0, ("scheduler", "worker", "api")),
    "aenqueue, 1,000 coroutines": ("coroutines", 2.0, ("scheduler", "worker")),
    "the same, nothing beside it": ("coroutines", 2.0, ()),
    "enqueue, one thread": ("single", 0.1, ("scheduler", "worker")),
}
"""By name: what the client does, how many of the tasks, and what runs beside it."""


def compare(checkouts: Sequence[Path], rounds: int, size: int, only: str) -> None:
    """Let the checkouts take turns, and show the best of each."""
    from orchestrator.embedded import EmbeddedServices

    found: dict[Path, dict[str, list[dict[str, float]]]] = {checkout: {} for checkout in checkouts}
    with tempfile.TemporaryDirectory(prefix="together-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "application.py").write_text(APPLICATION)
        with EmbeddedServices(folder / "services") as services:
            for number in range(rounds):
                for case in (case for case in CASES if only in case):
                    what, share, beside = CASES[case]
                    for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                        turns = found[checkout].setdefault(case, [])
                        url = services.postgres.create_database(f"turn_{os.urandom(6).hex()}")
                        environment = {
                            **os.environ,
                            "PYTHONPATH": str(checkout.resolve()),
                            "ORCHESTRATOR_DATABASE_URL": url,
                            "ORCHESTRATOR_REDIS_URL": services.redis_url,
                        }
                        servers = {"postgres": services.postgres.pid, "redis": services.redis.pid}
                        turns.append(_turn(what, int(size * share), beside, folder, environment, servers))
    for checkout, cases in found.items():
        print(f"\n{checkout}: tasks/s, and µs of CPU a task of {', '.join(PARTS)}")
        for case, turns in cases.items():
            rate = max(turn["rate"] for turn in turns)
            least = [min(turn.get(part, 0.0) for turn in turns) for part in PARTS]
            print(f"  {case:28}{rate:10,.0f}" + "".join(f"{value:9.1f}" for value in least))


def _turn(
    what: str,
    size: int,
    beside: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    servers: Mapping[str, int],
) -> dict[str, float]:
    """Start what runs beside the client, have it enqueue, and return what a task takes of each process."""
    orchestrator = [sys.executable, "-m", "orchestrator"]
    commands = {
        "scheduler": ["scheduler"],
        "worker": ["worker", "--app", "application:app", "--processes", "1", "--log-level", "warning"],
        "api": ["api", "--port", "0"],
    }
    ready = {"scheduler": "scheduler.ready", "worker": "", "api": r"api.ready docs=(\S+)/docs"}
    subprocess.run([*orchestrator, "db", "upgrade"], env=environment, cwd=folder, check=True, capture_output=True)
    parts = dict(servers)
    address = "-"
    with _stopped_at_the_end() as running:
        for name in beside:
            log = folder / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*orchestrator, *commands[name]], env=environment, cwd=folder, stdout=output, stderr=output
                )
            running.append(process)
            parts[name] = process.pid
            address = next(iter(_said(log, ready[name], process)), address)
        arguments = [sys.executable, __file__, "--size", str(size), "--client", what, address]
        client = subprocess.Popen(
            arguments, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(client)
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdout.readline()  # it has connections, and has tried them
        parts["client"] = client.pid
        before = {part: _cpu(process) for part, process in parts.items()}
        client.stdin.write("go\n")
        client.stdin.flush()
        seconds = float(client.stdout.readline())
        used = {part: (_cpu(process) - before[part]) / size * 1e6 for part, process in parts.items()}
        client.stdin.close()
        client.wait(30)
    return {**used, "rate": size / seconds}


@contextmanager
def _stopped_at_the_end() -> Iterator[list[subprocess.Popen[str] | subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


def _said(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> list[str]:
    """Wait until a program says something; return what stands in the brackets of the pattern."""
    deadline = time.monotonic() + 60
    while (found := re.findall(pattern, log.read_text())) == []:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{log.name}: {log.read_text()[-2000:]}")
        time.sleep(0.02)
    return found[-1:] if "(" in pattern else []


def _cpu(process: int) -> float:
    """Return the CPU time of a process, its threads and its children, also of those that have gone, in seconds."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        used = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        gone = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[13:15]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # its parent has what it used
    return used + sum(map(int, gone)) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu, children))


# -- the client


def measure(what: str, address: str, size: int) -> None:
    """Be ready, wait for the word, enqueue, and say how long it took."""
    if what == "single":
        _measure_single(size)
    else:
        enqueue = partial(_measure_http, address, has_keys=what == "keys") if address != "-" else _measure_coroutines
        asyncio.run(enqueue(size))


def _noop() -> Any:
    """Return the task of the application, as its clients know it."""
    from orchestrator import Orchestrator

    return Orchestrator().task(name="noop")(lambda value: value)


def _wait_for_the_word() -> float:
    print("ready", flush=True)
    sys.stdin.readline()
    return time.perf_counter()


def _tell(begun: float) -> None:
    print(time.perf_counter() - begun, flush=True)
    sys.stdin.readline()


def _measure_single(size: int) -> None:
    noop = _noop()
    noop.enqueue(1)
    begun = _wait_for_the_word()
    for number in range(size):
        noop.enqueue(number)
    _tell(begun)


async def _measure_coroutines(size: int) -> None:
    noop = _noop()

    async def enqueue(count: int) -> None:
        for number in range(count):
            await noop.aenqueue(number)

    await enqueue(1)
    begun = _wait_for_the_word()
    await asyncio.gather(*(enqueue(size // 1_000) for _ in range(1_000)))
    _tell(begun)


class _Http(asyncio.Protocol):
    """One client that keeps its connection, and sends the next request when it has the answer to the last."""

    def __init__(self, host: str, *, has_keys: bool) -> None:
        head = f"POST /api/v1/tasks HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += "Idempotency-Key: %s\r\n" if has_keys else ""
        self._request = f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}"
        self._has_keys = has_keys
        self._answer = b""
        self._left = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, count: int) -> asyncio.Future[None]:
        self._left = count
        self._done = asyncio.get_running_loop().create_future()
        self._send()
        return self._done

    def _send(self) -> None:
        request = self._request % os.urandom(8).hex() if self._has_keys else self._request
        self._transport.write(request.encode())

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if b"\r\n\r\n" not in self._answer or not self._answer.endswith(b"}"):
            return
        if not self._answer.startswith(b"HTTP/1.1 201"):
            self._done.set_exception(RuntimeError(self._answer.decode()))
            return
        self._answer = b""
        self._left -= 1
        if self._left:
            self._send()
        else:
            self._done.set_result(None)

    def connection_lost(self, _: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError("the server has closed the connection"))


async def _measure_http(address: str, size: int, clients: int = 50, *, has_keys: bool) -> None:
    host = address.removeprefix("http://")
    name, _, port = host.partition(":")
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: _Http(host, has_keys=has_keys), name, int(port)))[1]
        for _ in range(clients)
    ]
    await asyncio.gather(*(client.send(2) for client in made))
    begun = _wait_for_the_word()
    await asyncio.gather(*(client.send(size // clients) for client in made))
    _tell(begun)


if __name__ == "__main__":
    main()
