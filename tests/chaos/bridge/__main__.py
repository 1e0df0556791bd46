"""`python -m tests.chaos.bridge --kills 100`."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

from orchestrator.embedded import EmbeddedServices
from orchestrator.embedded.redis import EmbeddedRedis
from orchestrator.store import database
from tests.celery_packages import require_celery
from tests.chaos.breaking import send_group
from tests.chaos.bridge import journal
from tests.chaos.bridge.broker_log import read_log

ROOT = Path(__file__).parents[3]
VISIBILITY = 20
"""The visibility timeout of `theirs.py`, which cannot be imported without Celery."""
_DURABLE: dict[str, str | int] = {"appendfsync": "always", "auto-aof-rewrite-percentage": 0}
"""Settings of Celery's Redis: a kill loses no data, and the complete append-only file can be read afterwards."""
_READY = {
    "scheduler": b"scheduler.ready",
    "worker": b"process.ready",
    "celery": b" ready.",
    "bridge": b"bridge.ready",
    "bridge-2": b"bridge.ready",
}
"""Log text of each process once it works."""
_KILLS_PER_ROLLBACK = 20
"""Kills between two rollbacks to Celery."""
_QUIET = 330.0
"""Seconds without a new journal entry after which a task that has not run counts as lost.

Longer than kombu's lock on reserved messages, which stays for 300 s if its holder is killed.
"""
_REST_TIME = 10.0
"""Seconds after which no further run is expected if Celery's Redis holds no messages."""
_LOST_REDIS = re.compile(r"ConnectionError|BusyLoadingError|TimeoutError")
_REPORT_TIMEOUT = 5.0
"""Seconds within which the end of a run is reported, unless its worker is killed."""


@dataclass
class Verdict:
    """The result of an experiment."""

    kills: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    """Number of runs by system."""
    again: int = 0
    """Tasks that ran again because their worker was killed."""
    by_celery: int = 0
    """Tasks that Celery itself ran again, because its Redis was killed during the run."""
    given_back: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of sent tasks by kind."""
    read: int = 0
    """Number of results that producers have read."""
    wrong: list[str] = field(default_factory=list)
    """Tasks with the result of another run."""
    lost: list[str] = field(default_factory=list)
    lost_by_celery: list[str] = field(default_factory=list)
    """Tasks that Celery lost: its worker had popped the message, and it or Redis was killed before the reservation."""
    failed_by_celery: list[str] = field(default_factory=list)
    """Tasks that Celery failed with a connection error, because its Redis was killed during the run."""
    doubled: list[str] = field(default_factory=list)
    without_result: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.sent > 0 and not (self.lost or self.doubled or self.without_result or self.wrong)

    def __str__(self) -> str:
        kills, kinds = (
            ", ".join(f"{kind} {count}" for kind, count in sorted(counted.items()))
            for counted in (self.kills, self.kinds)
        )
        return (
            f"{sum(self.kills.values())} kills ({kills}); {self.sent} tasks sent ({kinds}), {self.read} results read "
            f"by producers, {self.ran['ours']} runs here, {self.ran['celery']} by Celery, {self.given_back} messages "
            f"given back; {self.again} ran again after their worker was killed, {self.by_celery} because Celery lost "
            f"its Redis; Celery's own workers lost "
            f"{len(self.lost_by_celery)} and failed {len(self.failed_by_celery)}. "
            f"Lost: {len(self.lost)} {self.lost[:5]}, doubled: {len(self.doubled)} "
            f"{self.doubled[:5]}, without result: {len(self.without_result)} {self.without_result[:5]}, "
            f"wrong: {len(self.wrong)} {self.wrong[:5]}."
        )


class Arena:
    """All servers and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.services = EmbeddedServices(folder / "services")
        self.redis = EmbeddedRedis(folder / "celery", settings=_DURABLE)
        self.strokes: list[tuple[float, str, set[int]]] = []
        """Kills: time, process name, and ids of the killed processes."""
        self._kill_log = (folder / "kills").open("a")
        self._log_offsets: dict[str, int] = {}
        """Offset in each process's log at its last start."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment: dict[str, str] = {}
        self._restore_after = VISIBILITY

    def open(self) -> None:
        self.services.start()
        database.upgrade(self.services.database_url)
        self.redis.start()
        path = self.redis.url.removeprefix("unix://")
        self.environment = {
            **os.environ,
            "BRIDGE_JOURNAL": str(self.journal),
            "BRIDGE_BROKER": f"redis+socket://{path}?virtual_host=0",
            "BRIDGE_RESULTS": f"redis+socket://{path}?virtual_host=1",
            "ORCHESTRATOR_DATABASE_URL": self.services.database_url,
            "ORCHESTRATOR_REDIS_URL": self.services.redis_url,
            "PYTHONWARNINGS": "ignore",
        }
        for name in self.commands():
            self.start(name)

    def commands(self) -> dict[str, list[str]]:
        return {
            "scheduler": ["orchestrator", "scheduler"],
            "worker": ["orchestrator", "worker", "--app", "tests.chaos.bridge.ours:app", "--processes", "2"],
            "celery": ["celery", "-A", "tests.chaos.bridge.theirs", "worker", "-c", "2", "-l", "info"],
            "bridge": self.bridging("--restore-after", str(self._restore_after)),
            "bridge-2": self.bridging("--restore-after", str(self._restore_after)),
            "producer": ["tests.chaos.bridge.producer"],
        }

    def bridging(self, *arguments: str) -> list[str]:
        addresses = ["--broker", self.environment["BRIDGE_BROKER"], "--results", self.environment["BRIDGE_RESULTS"]]
        return ["orchestrator", "bridge", "celery", *addresses, "--app", "tests.chaos.bridge.ours:app", *arguments]

    def start(self, name: str) -> None:
        log = self.folder / f"{name}.log"
        self._log_offsets[name] = log.stat().st_size if log.exists() else 0
        self._processes[name] = self.launch(name, self.commands()[name])

    def wait_until_ready(self, name: str) -> None:
        """Wait until a process works, so that its kill interrupts something; restart processes that have ended."""
        self.revive()
        until = time.monotonic() + 30
        while time.monotonic() < until and not self._is_ready(name):
            time.sleep(0.1)
            self.revive()

    def _is_ready(self, name: str) -> bool:
        if name not in _READY:
            return True
        log_output = (self.folder / f"{name}.log").read_bytes()[self._log_offsets[name] :]
        return log_output.count(_READY[name]) >= (2 if name == "worker" else 1)

    def launch(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a process with its descendants, and restart it."""
        if name == "redis":
            self._record_kill(name, set())
            self.redis.kill()
            self.redis.start()
            return
        self._kill(name)
        self.start(name)

    def _kill(self, name: str) -> None:
        process = self._processes[name]
        with suppress(psutil.NoSuchProcess):
            family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)} | {process.pid}
            self._record_kill(name, family)
        send_group(process.pid, signal.SIGKILL)
        process.wait()

    def _record_kill(self, name: str, family: set[int]) -> None:
        self.strokes.append((time.time(), name, family))
        self._kill_log.write(f"{time.time()} {name} {sorted(family)}\n")
        self._kill_log.flush()

    def revive(self, but: str = "") -> None:
        """Restart processes that have ended, such as a bridge that found no Redis at its start."""
        for name, process in list(self._processes.items()):
            if name != but and process.poll() is not None:
                self.start(name)

    def stop(self, name: str) -> None:
        process = self._processes[name]
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill(name)

    def retire_celery(self) -> None:
        """Stop Celery's worker for good, and let the bridges take its reserved messages at once."""
        self._kill("celery")
        del self._processes["celery"]
        self._restore_after = 0
        for name in ("bridge", "bridge-2"):
            self.stop(name)
            self.start(name)

    def give_back(self, roll: random.Random) -> int:
        """Roll back to Celery with `--back`, sometimes with a kill in between; resume. Return the number of messages.

        Our worker is stopped first, so that some messages have not started.
        """
        self.stop("worker")
        time.sleep(3)
        self.stop("bridge")
        self.stop("bridge-2")
        if roll.random() < 0.5:
            interrupted = self.launch("back", self.bridging("--back"))
            time.sleep(roll.uniform(2.0, 8.0))
            send_group(interrupted.pid, signal.SIGKILL)
            interrupted.wait()
        before, until = self._returned_counts(), time.monotonic() + 120
        while (back := self.launch("back", self.bridging("--back"))) and time.monotonic() < until:
            while back.poll() is None and len(self._returned_counts()) == len(before):
                time.sleep(0.1)
            if len(self._returned_counts()) > len(before):
                self.start("worker")  # finishes the tasks that have started, for which `--back` waits
                back.wait(120)
                break
        time.sleep(1)
        self.start("bridge")
        self.start("bridge-2")
        return sum(self._returned_counts())

    def _returned_counts(self) -> list[int]:
        """Return the number of messages that each `--back` has returned."""
        log = self.folder / "back.log"
        log_output = log.read_text().splitlines() if log.exists() else []
        return [int(line.split()[0].replace(",", "")) for line in log_output if "returned to Celery" in line]

    def close(self) -> None:
        for process in self._processes.values():
            send_group(process.pid, signal.SIGKILL)
            process.wait()
        self.redis.stop()
        self.services.stop()
        self._kill_log.close()


def run(kills: int, seed: int, folder: Path) -> Verdict:
    """Run an experiment: kill `kills` times, wait until everything has run, and judge."""
    roll, arena, verdict = random.Random(seed), Arena(folder), Verdict()
    try:
        arena.open()
        _wait_for_runs(arena)
        bag: list[str] = []
        for number in range(1, kills + 1):
            bag = bag or roll.sample([*arena.commands(), "redis"], 7)
            name = bag.pop()
            arena.wait_until_ready(name)
            time.sleep(roll.uniform(0.1, 1.0))
            arena.kill(name)
            verdict.kills[name.removesuffix("-2")] += 1
            if number % _KILLS_PER_ROLLBACK == 0:
                verdict.given_back = arena.give_back(roll)
        arena.journal.with_name("stop").touch()
        arena.retire_celery()
        _wait_for_rest(arena)
        _judge(arena, verdict)
    finally:
        arena.close()
    return verdict


def _wait_for_runs(arena: Arena) -> None:
    """Wait until both systems run tasks."""
    until = time.monotonic() + 120
    while {entry.get("who") for entry in journal.read(arena.journal)} < {None, "ours", "celery"}:
        if time.monotonic() > until:
            raise RuntimeError(f"Not all parts work; see {arena.folder}.")
        time.sleep(0.2)


def _wait_for_rest(arena: Arena) -> None:
    """Wait until each sent task has run, or no progress is made."""
    size, since = 0, time.monotonic()
    while time.monotonic() - since < _QUIET:
        entries = journal.read(arena.journal)
        ended = {entry["what"] for entry in entries if entry["event"] == "end"}
        if not _has_messages(arena) and (
            time.monotonic() - since > _REST_TIME
            or all(task_name in ended for entry in entries if entry["event"] == "sent" for task_name in entry["ids"])
        ):
            return
        if len(entries) != size:
            size, since = len(entries), time.monotonic()
        arena.revive(but="producer")
        time.sleep(0.5)


def _has_messages(arena: Arena) -> bool:
    with Redis.from_url(arena.redis.url) as redis:
        keys: Any = redis.keys("*")
        return any(
            redis.type(key) in (b"list", b"hash") for key in keys if not key.startswith((b"_kombu", b"unacked_"))
        )


def _judge(arena: Arena, verdict: Verdict) -> None:
    entries = journal.read(arena.journal)
    starts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    ends: dict[tuple[str, int], float] = {}
    read: dict[str, str] = {}
    for entry in entries:
        if entry["event"] == "start":
            starts[entry["what"]].append(entry)
            verdict.ran[entry["who"]] += 1
        elif entry["event"] == "end":
            ends[entry["what"], entry["pid"]] = entry["at"]
        elif entry["event"] == "sent":
            verdict.kinds[entry["kind"]] += 1
        elif entry["event"] == "read":
            read[entry["what"]] = entry["value"]
    sent = {task_name: id for entry in entries if entry["event"] == "sent" for task_name, id in entry["ids"].items()}
    verdict.sent = len(sent)
    celerys, arrivals = read_log(arena.redis.folder)
    families: defaultdict[str, set[str]] = defaultdict(set)
    for task_name, id in sent.items():
        families[_base_name(task_name)].add(id)
    missing = sorted(task_name for task_name in sent if task_name not in starts)
    verdict.lost_by_celery = [task_name for task_name in missing if families[_base_name(task_name)] & celerys]
    written = _results(arena, sent)
    cut_off = {
        sent[task_name]
        for task_name, runs in starts.items()
        if task_name in sent
        and any(
            run["who"] == "celery" and _excuse(arena, run, ends.get((task_name, run["pid"]))) == "redis" for run in runs
        )
    }
    broken = {task_name for task_name in sent if _is_cut_off(sent[task_name], written[task_name], cut_off)}
    after = {_base_name(task_name) for task_name in broken}
    unsent = {
        task_name for task_name in missing if _base_name(task_name) in after and task_name not in verdict.lost_by_celery
    }
    verdict.failed_by_celery = sorted(broken | unsent)
    verdict.lost = [task_name for task_name in missing if task_name not in {*verdict.lost_by_celery, *unsent}]
    excused: dict[str, str] = {}
    for task_name, runs in sorted(starts.items(), key=lambda item: _sending_order(item[0])):
        if len(runs) == 1:
            continue
        reasons = [_excuse(arena, run, ends.get((task_name, run["pid"]))) for run in runs]
        if arrivals[sent.get(task_name, "")] > 1:  # sent by the producer and by Celery's worker, or twice by the worker
            first = starts.get(f"{task_name}#1", ())
            if not first or any(_excuse(arena, run, ends.get((f"{task_name}#1", run["pid"]))) for run in first):
                reasons.append("celery")
        before = (
            (task_name.removesuffix("/2"),)
            if task_name.endswith("/2")
            else (f"{task_name}/a", f"{task_name}/b", f"{task_name}#1")
        )
        reasons += [excused[one] for one in before if one in excused]  # the task that sends this one ran again
        if sum(bool(reason) for reason in reasons) < len(runs) - 1:
            verdict.doubled.append(f"{task_name}: {[(run['who'], run['pid']) for run in runs]}")
        else:
            excused[task_name] = next(filter(None, reasons))
            verdict.again += excused[task_name] != "redis"
            verdict.by_celery += excused[task_name] == "redis"
    verdict.read = len(read)
    verdict.wrong = [
        f"{task_name}: read {value}"
        for task_name, value in read.items()
        if value != task_name and task_name not in broken and sent[task_name] not in cut_off  # may have run again since
    ]
    for task_name, found in written.items():
        if task_name in starts and not found:
            verdict.without_result.append(task_name)
        elif found and found["result"] != task_name.removesuffix("#1") and task_name not in broken:
            verdict.wrong.append(f"{task_name}: {found['status']} {found['result']}")


def _results(arena: Arena, sent: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the stored result of each task."""
    with Redis.from_url(arena.redis.url, db=1) as redis:
        texts: Any = redis.mget([f"celery-task-meta-{id}" for id in sent.values()])
    return {task_name: json.loads(text) if text else {} for task_name, text in zip(sent, texts, strict=True)}


def _is_cut_off(id: str, found: dict[str, Any], cut_off: set[str]) -> bool:
    """Return whether a task or its chord failed because Celery's worker lost its Redis.

    Tasks raise no Redis errors themselves, and the bridge stores the errors of tasks.
    """
    if found.get("status") != "FAILURE":
        return False
    error, message = found["result"]["exc_type"], str(found["result"]["exc_message"])
    if error == "ChordError":
        return any(f"Dependency {part} raised" in message and _LOST_REDIS.search(message) for part in cut_off)
    return bool(found["result"]["exc_module"] == "redis.exceptions") and id in cut_off


def _base_name(task_name: str) -> str:
    """Return the name part that all tasks of a chain, a chord or a retry share."""
    return task_name.partition("/")[0].partition("#")[0]


def _sending_order(task_name: str) -> tuple[str, int]:
    """Return a sort key by which each task comes after the tasks that send it."""
    return _base_name(task_name), 0 if task_name.endswith(("/a", "/b", "#1")) else 2 if task_name.endswith("/2") else 1


def _excuse(arena: Arena, run: dict[str, Any], ended: float | None) -> str:
    """Return which kill may have caused another run of a task, or an empty string."""
    until = float("inf") if ended is None else ended + _REPORT_TIMEOUT
    for at, name, family in arena.strokes:
        is_own = run["pid"] in family or (name == "redis" and run["who"] == "celery")
        if is_own and run["at"] - 0.05 <= at <= until:
            return name
    return ""


def main() -> None:
    """Run the command; exit with 1 if anything was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    options = parser.parse_args()
    require_celery()
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-bridge-"))
    folder.chmod(0o755)
    verdict = run(options.kills, options.seed, folder)
    sys.stdout.write(f"{verdict}\n{json.dumps(vars(verdict))}\n")
    if verdict.is_good and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        sys.stdout.write(f"See {folder}\n")
    sys.exit(not verdict.is_good)


if __name__ == "__main__":
    main()
