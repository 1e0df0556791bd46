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
"""As in `theirs.py`, which needs Celery."""
_KEPT: dict[str, str | int] = {"appendfsync": "always", "auto-aof-rewrite-percentage": 0}
"""Settings of Celery's Redis: a kill loses nothing, and its whole log can be read afterwards."""
_READY = {
    "scheduler": b"scheduler.ready",
    "worker": b"process.ready",
    "celery": b" ready.",
    "bridge": b"bridge.ready",
    "bridge-2": b"bridge.ready",
}
"""What each part logs when it works."""
_BACK_EVERY = 20
"""Kills between two times that everything is given back to Celery."""
_QUIET = 330.0
"""Seconds without a new line in the journal after which what has not run is lost.

Longer than kombu's lock on reserved messages, which stays for 300 s if its holder is killed.
"""
_SETTLED = 10.0
"""Seconds after which nothing comes any more if Celery's Redis has no messages."""
_LOST_REDIS = re.compile(r"ConnectionError|BusyLoadingError|TimeoutError")
_REPORTED = 5.0
"""Seconds after which the end of a run is known elsewhere, or its worker was killed before it could say so."""


@dataclass
class Verdict:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    """Who has run how many."""
    again: int = 0
    """Tasks that ran again because their worker was killed."""
    by_celery: int = 0
    """Tasks that Celery itself ran again, because its Redis was killed while it ran them."""
    given_back: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """How many were sent of each kind."""
    read: int = 0
    """Results that the producers have read meanwhile."""
    wrong: list[str] = field(default_factory=list)
    """Tasks whose result is not that of their run."""
    lost: list[str] = field(default_factory=list)
    lost_by_celery: list[str] = field(default_factory=list)
    """A worker of Celery had taken them out of Redis and not reserved them yet when it, or Redis, was killed."""
    failed_by_celery: list[str] = field(default_factory=list)
    """A worker of Celery ran them while its Redis was killed, and wrote the lost connection as their error."""
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
        self.redis = EmbeddedRedis(folder / "celery", settings=_KEPT)
        self.strokes: list[tuple[float, str, set[int]]] = []
        """When which part was killed, with these processes."""
        self._strokes = (folder / "kills").open("a")
        self._said: dict[str, int] = {}
        """By part, where what it has logged since its last start begins."""
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

    def bridging(self, *words: str) -> list[str]:
        addresses = ["--broker", self.environment["BRIDGE_BROKER"], "--results", self.environment["BRIDGE_RESULTS"]]
        return ["orchestrator", "bridge", "celery", *addresses, "--app", "tests.chaos.bridge.ours:app", *words]

    def start(self, name: str) -> None:
        log = self.folder / f"{name}.log"
        self._said[name] = log.stat().st_size if log.exists() else 0
        self._processes[name] = self.launch(name, self.commands()[name])

    def wait_until_ready(self, name: str) -> None:
        """Wait until a part works, so that its kill interrupts something; start those that gave up."""
        self.revive()
        until = time.monotonic() + 30
        while time.monotonic() < until and not self._is_ready(name):
            time.sleep(0.1)
            self.revive()

    def _is_ready(self, name: str) -> bool:
        if name not in _READY:
            return True
        said = (self.folder / f"{name}.log").read_bytes()[self._said[name] :]
        return said.count(_READY[name]) >= (2 if name == "worker" else 1)

    def launch(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a part with all that it forked, and start it anew."""
        if name == "redis":
            self._note(name, set())
            self.redis.kill()
            self.redis.start()
            return
        self._kill(name)
        self.start(name)

    def _kill(self, name: str) -> None:
        process = self._processes[name]
        with suppress(psutil.NoSuchProcess):
            family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)} | {process.pid}
            self._note(name, family)
        send_group(process.pid, signal.SIGKILL)
        process.wait()

    def _note(self, name: str, family: set[int]) -> None:
        self.strokes.append((time.time(), name, family))
        self._strokes.write(f"{time.time()} {name} {sorted(family)}\n")
        self._strokes.flush()

    def revive(self, but: str = "") -> None:
        """Start what has ended by itself, such as a bridge whose Redis was away at its start."""
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
        """Let the bridges take what Celery's worker has reserved, which does not come back."""
        self._kill("celery")
        del self._processes["celery"]
        self._restore_after = 0
        for name in ("bridge", "bridge-2"):
            self.stop(name)
            self.start(name)

    def give_back(self, roll: random.Random) -> int:
        """Stop the bridges, give back to Celery, sometimes with a kill in the middle, and let it work for a while.

        Without a worker, there is something that has not started.
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
        before, until = self._given(), time.monotonic() + 120
        while (back := self.launch("back", self.bridging("--back"))) and time.monotonic() < until:
            while back.poll() is None and len(self._given()) == len(before):
                time.sleep(0.1)
            if len(self._given()) > len(before):
                self.start("worker")  # for which those wait that had started
                back.wait(120)
                break
        time.sleep(1)
        self.start("bridge")
        self.start("bridge-2")
        return sum(self._given())

    def _given(self) -> list[int]:
        """Return how many messages each `--back` has given back."""
        log = self.folder / "back.log"
        said = log.read_text().splitlines() if log.exists() else []
        return [int(line.split()[0].replace(",", "")) for line in said if "returned to Celery" in line]

    def close(self) -> None:
        for process in self._processes.values():
            send_group(process.pid, signal.SIGKILL)
            process.wait()
        self.redis.stop()
        self.services.stop()
        self._strokes.close()


def run(kills: int, seed: int, folder: Path) -> Verdict:
    """Kill so many times, wait until everything has run, and judge."""
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
            if number % _BACK_EVERY == 0:
                verdict.given_back = arena.give_back(roll)
        arena.journal.with_name("stop").touch()
        arena.retire_celery()
        _wait_for_rest(arena)
        _judge(arena, verdict)
    finally:
        arena.close()
    return verdict


def _wait_for_runs(arena: Arena) -> None:
    """Wait until both systems work."""
    until = time.monotonic() + 120
    while {entry.get("who") for entry in journal.read(arena.journal)} < {None, "ours", "celery"}:
        if time.monotonic() > until:
            raise RuntimeError(f"Not all parts work; see {arena.folder}.")
        time.sleep(0.2)


def _wait_for_rest(arena: Arena) -> None:
    """Wait until each task that was sent has run, or nothing runs any more."""
    size, since = 0, time.monotonic()
    while time.monotonic() - since < _QUIET:
        entries = journal.read(arena.journal)
        ended = {entry["what"] for entry in entries if entry["event"] == "end"}
        if not _has_messages(arena) and (
            time.monotonic() - since > _SETTLED
            or all(what in ended for entry in entries if entry["event"] == "sent" for what in entry["ids"])
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
    sent = {what: id for entry in entries if entry["event"] == "sent" for what, id in entry["ids"].items()}
    verdict.sent = len(sent)
    celerys, arrivals = read_log(arena.redis.folder)
    families: defaultdict[str, set[str]] = defaultdict(set)
    for what, id in sent.items():
        families[_family(what)].add(id)
    missing = sorted(what for what in sent if what not in starts)
    verdict.lost_by_celery = [what for what in missing if families[_family(what)] & celerys]
    written = _results(arena, sent)
    cut_off = {
        sent[what]
        for what, runs in starts.items()
        if what in sent
        and any(run["who"] == "celery" and _excuse(arena, run, ends.get((what, run["pid"]))) == "redis" for run in runs)
    }
    broken = {what for what in sent if _is_cut_off(sent[what], written[what], cut_off)}
    after = {_family(what) for what in broken}
    unsent = {what for what in missing if _family(what) in after and what not in verdict.lost_by_celery}
    verdict.failed_by_celery = sorted(broken | unsent)
    verdict.lost = [what for what in missing if what not in {*verdict.lost_by_celery, *unsent}]
    excused: dict[str, str] = {}
    for what, runs in sorted(starts.items(), key=lambda item: _place(item[0])):
        if len(runs) == 1:
            continue
        reasons = [_excuse(arena, run, ends.get((what, run["pid"]))) for run in runs]
        if arrivals[sent.get(what, "")] > 1:  # by its producer, and by a worker of Celery, or twice by that
            first = starts.get(f"{what}#1", ())
            if not first or any(_excuse(arena, run, ends.get((f"{what}#1", run["pid"]))) for run in first):
                reasons.append("celery")
        before = (what.removesuffix("/2"),) if what.endswith("/2") else (f"{what}/a", f"{what}/b", f"{what}#1")
        reasons += [excused[one] for one in before if one in excused]  # which has sent what follows it once more
        if sum(bool(reason) for reason in reasons) < len(runs) - 1:
            verdict.doubled.append(f"{what}: {[(run['who'], run['pid']) for run in runs]}")
        else:
            excused[what] = next(filter(None, reasons))
            verdict.again += excused[what] != "redis"
            verdict.by_celery += excused[what] == "redis"
    verdict.read = len(read)
    verdict.wrong = [
        f"{what}: read {value}"
        for what, value in read.items()
        if value != what and what not in broken and sent[what] not in cut_off  # which may have run again since
    ]
    for what, found in written.items():
        if what in starts and not found:
            verdict.without_result.append(what)
        elif found and found["result"] != what.removesuffix("#1") and what not in broken:
            verdict.wrong.append(f"{what}: {found['status']} {found['result']}")


def _results(arena: Arena, sent: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return what is written as the result of each task."""
    with Redis.from_url(arena.redis.url, db=1) as redis:
        texts: Any = redis.mget([f"celery-task-meta-{id}" for id in sent.values()])
    return {what: json.loads(text) if text else {} for what, text in zip(sent, texts, strict=True)}


def _is_cut_off(id: str, found: dict[str, Any], cut_off: set[str]) -> bool:
    """Say whether a task failed with the error of a worker of Celery that lost its Redis, or its chord did.

    No task raises that error, and the bridge writes the errors of tasks.
    """
    if found.get("status") != "FAILURE":
        return False
    error, message = found["result"]["exc_type"], str(found["result"]["exc_message"])
    if error == "ChordError":
        return any(f"Dependency {part} raised" in message and _LOST_REDIS.search(message) for part in cut_off)
    return bool(found["result"]["exc_module"] == "redis.exceptions") and id in cut_off


def _family(what: str) -> str:
    """Return the first part of the name that all tasks of a chain, a chord or a retry share."""
    return what.partition("/")[0].partition("#")[0]


def _place(what: str) -> tuple[str, int]:
    """Order tasks so that each comes after those that send it."""
    return _family(what), 0 if what.endswith(("/a", "/b", "#1")) else 2 if what.endswith("/2") else 1


def _excuse(arena: Arena, run: dict[str, Any], ended: float | None) -> str:
    """Say which kill may have made a task run again after this run of it."""
    until = float("inf") if ended is None else ended + _REPORTED
    for at, name, family in arena.strokes:
        is_own = run["pid"] in family or (name == "redis" and run["who"] == "celery")
        if is_own and run["at"] - 0.05 <= at <= until:
            return name
    return ""


def main() -> None:
    """Run it, and exit with 1 if anything was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    given = parser.parse_args()
    require_celery()
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-bridge-"))
    folder.chmod(0o755)
    verdict = run(given.kills, given.seed, folder)
    sys.stdout.write(f"{verdict}\n{json.dumps(vars(verdict))}\n")
    if verdict.is_good and not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        sys.stdout.write(f"See {folder}\n")
    sys.exit(not verdict.is_good)


if __name__ == "__main__":
    main()
