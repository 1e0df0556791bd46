"""`python -m tests.chaos.messages --kills 50 --seed 1`."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import CodeWorkflow, OrchestratorError, ResultTimeout, Unavailable, Uncertain
from orchestrator.domain.code import history
from orchestrator.embedded import EmbeddedServices
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.store import database
from orchestrator.testing import replay
from tests.acceptance.stack import Process, Stack, using
from tests.chaos.cutting import Cutting
from tests.chaos.messages.ledgers import END, Ledger, app, mailbox

HERE = Path(__file__).parent
_SETTINGS = {"worker_ttl": 3.0, "heartbeat": 0.5, "lease": 2.0}
_STATEMENTS = (b"inbox.add", b"COMMIT", b"SELECT /* ")
"""One of these is cut when the connection of a sender is: before its end is known, or while an answer is awaited."""
_TRY = 5.0
"""Seconds that a sender waits for an answer before it sends the message again, with the same id."""
_SILENCE = 60.0
"""Seconds without a kill after which a message without an answer, or a run without an end, is a defect."""


@dataclass
class Verdict:
    """What came of it."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    signals: int = 0
    updates: int = 0
    queries: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    """Messages that were sent once more, by reason."""
    turns: int = 0
    longest: float = 0.0
    """Seconds until the slowest message was answered, kills and all."""
    longest_end: float = 0.0
    """Seconds from the last kill to the end of the last run."""
    wrong: list[str] = field(default_factory=list)


class Sender:
    """Sends numbered messages to one run, each after the last was answered, and knows what must have come of them."""

    def __init__(self, workflow: CodeWorkflow[..., Any], seed: int, verdict: Verdict, quiet_since: Callable[[], float]):
        self.workflow = workflow
        self.handle = workflow.start()
        self.verdict = verdict
        self.sent: list[tuple[str, int]] = []
        self.answers: dict[int, int] = {}
        self.stop = threading.Event()
        self._roll = random.Random(seed)
        self._quiet_since = quiet_since
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self.stop.set()
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  # whatever happens to a sender is a finding
            self.wrong(f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self.stop.is_set():
            number = len(self.sent) + 1
            kind = self._roll.choice(("signal", "update"))
            self.sent.append((kind, number))
            begun = time.monotonic()
            self._deliver(kind, number)
            self.verdict.longest = max(self.verdict.longest, time.monotonic() - begun)
            if self._roll.random() < 0.2:
                self._deliver(kind, number)  # although it is known to be applied
            if self._roll.random() < 0.3:
                self._query()
            time.sleep(self._roll.choice((0.0, 0.0, 0.05, 0.2)))
        self.sent.append(("signal", END))
        self._deliver("signal", END)

    def _deliver(self, kind: str, number: int) -> None:
        handle = self.handle.options(id=f"{kind}-{number}", timeout=_TRY)
        if kind == "signal":
            self._insist(lambda: handle.signal("push", number))
            return
        answer = self._insist(lambda: handle.update("add", number))
        if self.answers.setdefault(number, answer) != answer:
            self.wrong(f"update {number} was answered with {self.answers[number]}, then with {answer}")

    def _query(self) -> None:
        least = len(self.answers)
        self.verdict.queries += 1
        count = self._insist(lambda: self.handle.options(timeout=_TRY).query("count"))
        if not least <= count <= len(self.sent):
            self.wrong(f"a query said that {count} of {len(self.sent)} messages were noted, of which {least} answered")

    def _insist(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except (ResultTimeout, Uncertain, Unavailable) as error:
                self.verdict.repeated[type(error).__name__] += 1
                since = self._quiet_since()
                if since and time.monotonic() - since > _SILENCE:
                    raise

    def wrong(self, problem: str) -> None:
        self.verdict.wrong.append(f"run {self.handle.id}: {problem}")

    def judge(self) -> None:
        """Compare the end of the run and its history with what was sent."""
        verdict, sent = self.verdict, self.sent
        try:
            noted = self.handle.result(_SILENCE)
        except OrchestratorError as error:
            self.wrong(f"{type(error).__name__}: {error}")
            return
        verdict.longest_end = max(verdict.longest_end, time.monotonic() - self._quiet_since())
        kinds = {number: kind for kind, number in sent}
        for one in ("signal", "update"):
            expected = [number for kind, number in sent if kind == one]
            found = [number for number in noted if kinds.get(number) == one]
            if found != expected:
                lost, doubled = set(expected) - set(found), [n for n, times in Counter(found).items() if times > 1]
                self.wrong(f"{one}s lost: {sorted(lost)}, doubled: {doubled}, in order: {found == sorted(found)}")
        if self.workflow is Ledger.run and noted != [number for _, number in sent]:
            self.wrong("messages of different kinds were noted in another order than sent")
        recording = self.handle.history()
        recorded, requested = {}, {}
        for event in recording.events:
            if isinstance(event.what, history.UpdateRequested):
                requested[event.what.id] = decode_call(event.what.payload)[0][0]
            elif isinstance(event.what, history.UpdateAnswered):
                recorded[requested[event.what.id]] = decode_value(event.what.result or b"\xc0")
        if self.answers != recorded:
            self.wrong(f"the answers differ from those in the history: {self.answers.items() ^ recorded.items()}")
        if unlike := [number for number, place in self.answers.items() if noted[place - 1] != number]:
            self.wrong(f"the answers of updates {unlike} were not those of the run as it is now")
        verdict.turns += sum(isinstance(event.what, history.ActivationApplied) for event in recording.events)
        replay(self.workflow, recording, exactly=True)


class Arena:
    """Two schedulers and two workers, of which one is killed at a time and replaced."""

    def __init__(self, stack: Stack, cutting: Cutting, roll: random.Random) -> None:
        self.stack = stack
        self._cutting = cutting
        self._roll = roll
        self._workers: list[Process] = []
        self.quiet_since = 0.0

    def start(self) -> None:
        self.stack.scheduler()
        self.stack.scheduler(wait=False)
        self._workers = [self._worker(wait=True) for _ in range(2)]

    def _worker(self, *, wait: bool) -> Process:
        return self.stack.worker("--app", "ledgers:app", folder=HERE, wait=wait)

    def kill(self) -> str:
        """Kill something, and start what replaces it; return what it was."""
        victim = self._roll.choices(("worker", "both workers", "leader", "connection"), (4, 1, 2, 2))[0]
        if victim == "connection":
            self._cutting.arm(self._roll.choice(_STATEMENTS))
        elif victim == "leader":
            self.stack.leader().kill()
            self.stack.scheduler(wait=False)
        else:
            self._roll.shuffle(self._workers)
            for _ in range(2 if victim == "both workers" else 1):
                self._workers.pop(0).kill()
                self._workers.append(self._worker(wait=False))
        return victim


def run(kills: int, seed: int, folder: Path, runs: int = 4, pace: tuple[float, float] = (0.5, 4.0)) -> Verdict:
    """Kill so many times while messages are sent, let all runs end, and judge."""
    roll, verdict = random.Random(seed), Verdict(seed)
    (folder / "cut").mkdir(mode=0o755)
    with EmbeddedServices(folder / "services") as services:
        database.upgrade(services.database_url)
        stack = Stack(services.database_url, services.redis_url, folder, **_SETTINGS)
        with Cutting(services.database_url, folder / "cut") as cutting:
            arena = Arena(stack, cutting, roll)
            client = Stack(cutting.url, services.redis_url, folder, **_SETTINGS)
            try:
                with using(app, client):
                    arena.start()
                    workflows = [(Ledger.run, mailbox)[number % 2] for number in range(runs)]
                    senders = [
                        Sender(workflow, seed * 100 + number, verdict, lambda: arena.quiet_since)
                        for number, workflow in enumerate(workflows)
                    ]
                    for _ in range(kills):
                        time.sleep(roll.uniform(*pace))
                        verdict.kills[arena.kill()] += 1
                    cutting.arm(b"")
                    arena.quiet_since = time.monotonic()
                    for sender in senders:
                        sender.finish()
                    for sender in senders:
                        sender.judge()
            finally:
                client.close()
                stack.close()
    verdict.runs = len(senders)
    for sender in senders:
        verdict.signals += sum(kind == "signal" for kind, _ in sender.sent)
        verdict.updates += len(sender.answers)
    return verdict


def main() -> None:
    """Run it, and exit with 1 if a guarantee was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--pace", type=float, nargs=2, default=(0.5, 4.0), help="seconds between two kills")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-messages-"))
    folder.chmod(0o755)
    verdict = run(given.kills, given.seed, folder, given.runs, given.pace)
    sys.stdout.write(f"{json.dumps(vars(verdict))}\n")
    if verdict.wrong or given.keep:
        sys.stdout.write(f"See {folder}\n")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(verdict.wrong))


if __name__ == "__main__":
    main()
