"""Executes a plan of faults: injects and heals each at its time, and records both."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

import psutil
from redis.exceptions import RedisError

from tests.chaos.real.arena import Arena
from tests.chaos.real.faults import FAULTS
from tests.chaos.real.journal import append
from tests.chaos.real.plan import Strike


class Driver:
    """Injects the faults into an arena in a thread; when the thread has ended, everything is healed."""

    def __init__(self, arena: Arena, plan: Sequence[Strike]) -> None:
        self._arena = arena
        self._plan = plan
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._stopping = threading.Event()
        self._began = 0.0
        self.injected: Counter[str] = Counter()
        """Injected faults by kind."""
        self.active: list[str] = []
        """The kinds of faults that are not yet healed."""
        self.history: list[str] = []
        self.error: BaseException | None = None

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Inject no further faults, and heal the active ones."""
        self._stopping.set()
        self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the plan; return whether it has ended. Raise an error of the driver itself."""
        self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()

    def _run(self) -> None:
        events: list[tuple[float, int, Strike, ExitStack | None]] = [
            (strike.at, number, strike, None) for number, strike in enumerate(self._plan)
        ]
        heapq.heapify(events)
        try:
            while events:
                at, number, strike, healing = heapq.heappop(events)
                stopped = self._stopping.wait(max(0.0, at - self._now()))
                if healing is not None:
                    self._heal(strike, healing)
                elif not stopped and (healing := self._inject(strike)) is not None:
                    heapq.heappush(events, (self._now() + strike.seconds, number, strike, healing))
        except BaseException as error:  # noqa: BLE001  # raised again in `wait`
            self.error = error
        finally:
            for _, _, strike, healing in events:
                if healing is not None:
                    self._heal(strike, healing)

    def _inject(self, strike: Strike) -> ExitStack | None:
        healing = ExitStack()
        try:
            description = healing.enter_context(FAULTS[strike.kind](self._arena, Random(strike.pick)))
        except (RedisError, psutil.NoSuchProcess) as error:
            self._note(f"{strike.kind} missed: {error}")  # the target is already down
            return None
        self.injected[strike.kind] += 1
        self.active.append(strike.kind)
        self._note(f"{description}, for {strike.seconds:.2f} s")
        return healing

    def _heal(self, strike: Strike, healing: ExitStack) -> None:
        healing.close()
        self.active.remove(strike.kind)
        self._note(f"{strike.kind} healed")

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, description: str) -> None:
        self.history.append(f"{self._now():7.2f} ({time.strftime('%H:%M:%S')}) {description}")
        append(self._arena.folder / "faults", self.history[-1])
