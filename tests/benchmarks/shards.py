"""Shards: the CPU time per task in each process with one, two and four shards, and a model of more.

On a shared machine, CPU time per process is more reliable than rates. With many processes on few cores, each tick has
fewer tasks, which makes a task more expensive with more shards; the output has this number. `--write` draws
docs/images/shards.svg. Linux only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from math import log10
from pathlib import Path

from tests.benchmarks.growth.page import IMAGES, opening
from tests.benchmarks.processes import APPLICATION, REPOSITORY, _cpu, _stop_afterwards, _wait_for_log

BATCH = 500
_METRICS = 19_464
_PROCESSES = 4
"""Worker processes per shard, so that all leaders have the same number of slots."""
_ALL = "tasks a second", "tasks a tick"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--size", type=int, default=20_000, help="tasks of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="draw docs/images/shards.svg")
    options = parser.parse_args()
    from orchestrator.embedded import EmbeddedServices

    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in options.numbers}
    with tempfile.TemporaryDirectory(prefix="shards-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "application.py").write_text(APPLICATION)
        with EmbeddedServices(folder / "services") as services:
            for _ in range(options.rounds):
                for number, found in rounds.items():
                    url = services.postgres.create_database(f"shards_{os.urandom(6).hex()}")
                    os.environ |= {
                        "PYTHONPATH": str(REPOSITORY),
                        "ORCHESTRATOR_DATABASE_URL": url,
                        "ORCHESTRATOR_REDIS_URL": services.redis_url,
                        "ORCHESTRATOR_NAMESPACE": f"shards_{os.urandom(4).hex()}",
                        "ORCHESTRATOR_SHARDS": str(number),
                    }
                    servers = {"postgres": services.postgres.pid, "redis": services.redis.pid}
                    found.append(measure(folder, servers, options.size, number))
                    _show(number, found[-1])
    print("the best round of each, because others can only spoil it")
    costs = {number: min(found, key=lambda one: sum(one[part] for part in PARTS)) for number, found in rounds.items()}
    for number, cost in costs.items():
        _show(number, cost)
    if options.write:
        (REPOSITORY / IMAGES / "shards.svg").write_text(chart(costs), encoding="utf-8")


def _show(number: int, found: Mapping[str, float]) -> None:
    print(f"{number} shards: " + ", ".join(f"{name} {value:,.0f}" for name, value in found.items()), flush=True)


def measure(folder: Path, servers: dict[str, int], size: int, shards: int) -> dict[str, float]:
    """Run a backlog of `size` tasks, from the resumption of the queue to the last end; return µs of CPU per task."""
    sys.path.insert(0, str(folder))
    import application  # type: ignore[import-not-found]  # written by the program

    orchestrator = [sys.executable, "-m", "orchestrator"]
    subprocess.run([*orchestrator, "db", "upgrade"], cwd=folder, check=True, capture_output=True)
    application.app.close()
    application.app._client._settings = None
    application.app.queue("default").pause()
    for start in range(0, size, BATCH):
        application.app.enqueue_many(application.noop, [(one,) for one in range(start, start + BATCH)])
    parts, processes = dict(servers), _PROCESSES * shards
    with _stop_afterwards() as running:
        for name, arguments, ready, number in (
            ("scheduler", ["scheduler", "--metrics", f"127.0.0.1:{_METRICS}"], "scheduler.leading", shards),
            (
                "worker",
                ["worker", "--app", "application:app", "--processes", str(processes)],
                "process.ready",
                processes,
            ),
        ):
            log = folder / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen([*orchestrator, *arguments], cwd=folder, stdout=output, stderr=output)
            running.append(process)
            parts[name] = process.pid
            while log.read_text().count(ready) < number:
                _wait_for_log(log, ready, process)
                time.sleep(0.05)
        ticks, before = _ticks(shards), {part: _cpu(process) for part, process in parts.items()}
        began = time.monotonic()
        application.app.queue("default").resume()
        while application.app.queue("default").open():
            time.sleep(0.1)
        seconds = time.monotonic() - began
        used = {part: (_cpu(process) - before[part]) / size * 1e6 for part, process in parts.items()}
        ticks = _ticks(shards) - ticks
    application.app.close()
    return {**used, **dict(zip(_ALL, (size / seconds, size / ticks), strict=True))}


def _ticks(shards: int) -> float:
    """Return the number of ticks of all leaders."""
    addresses = [f"http://127.0.0.1:{_METRICS + shard}/metrics" for shard in range(shards)]
    found = [urllib.request.urlopen(address, timeout=30).read().decode() for address in addresses]
    return sum(map(float, re.findall(r"^orchestrator_ticks_total\S* (\S+)", "\n".join(found), re.MULTILINE)))


# -- the chart

PARTS = {
    "scheduler": ("schedulers", "#3f51b5", "#9fa8da"),
    "postgres": ("Postgres", "#c2410c", "#fb923c"),
    "redis": ("Redis", "#15803d", "#4ade80"),
}
"""The parts: title, and colors on light and dark pages."""
_CORES = 32
_WIDTH, _HEIGHT, _TOP, _LEFT, _RIGHT = 260, 170, 76, 56, 420


def chart(costs: Mapping[int, Mapping[str, float]]) -> str:
    """Return an SVG with the measurements, and a model of each part's capacity with up to 64 shards."""
    one = costs[min(costs)]
    limits: dict[str, Callable[[int], float]] = {
        "scheduler": lambda shards: shards * 1e6 / one["scheduler"],
        "postgres": lambda _: _CORES * 1e6 / one["postgres"],
        "redis": lambda _: 1e6 / one["redis"],
    }
    lines = opening("What a task costs with shards, and what they could do", 720, 352, PARTS)
    for number, (part, (name, _, _)) in enumerate(PARTS.items()):
        lines.append(f'<rect class="{part}" x="{16 + 110 * number}" y="39" width="14" height="3"/>')
        lines.append(_text(36 + 110 * number, 45, name))
    lines += [*_bars(costs), *_model(limits)]
    notes = (
        f"The model: a task costs what it costs with one shard, {one[_ALL[1]]:.0f} tasks in a tick. Each shard has",
        f"a core, Postgres has {_CORES}, which it uses evenly, a Redis node has one (a cluster adds nodes).",
        "Locks, network and disks (1.1 KB of WAL a task) set no limit.",
    )
    lines += [_text(16, _TOP + _HEIGHT + 58 + 16 * number, text) for number, text in enumerate(notes)]
    return "\n".join((*lines, "</svg>\n"))


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _bars(costs: Mapping[int, Mapping[str, float]]) -> list[str]:
    lines = [_text(16, _TOP - 8, "Measured on two cores: µs of CPU a task, and tasks in a tick")]
    highest = max(cost[part] for cost in costs.values() for part in PARTS)
    for index, (shards, cost) in enumerate(costs.items()):
        left = _LEFT + index * _WIDTH / len(costs)
        for number, part in enumerate(PARTS):
            height = round((_HEIGHT - 16) * cost[part] / highest, 1)
            x, y = round(left + 24 * number, 1), round(_TOP + _HEIGHT - height, 1)
            lines.append(f'<rect class="{part}" x="{x}" y="{y}" width="20" height="{height}"/>')
            lines.append(_text(x + 10, y - 4, f"{cost[part]:.0f}", "middle"))
        lines.append(_text(left + 34, _TOP + _HEIGHT + 15, f"{shards} shard{'s'[: shards > 1]}", "middle"))
        lines.append(_text(left + 34, _TOP + _HEIGHT + 30, f"{cost[_ALL[1]]:.0f} tasks", "middle"))
    return lines


def _model(limits: Mapping[str, Callable[[int], float]]) -> list[str]:
    shards, low, high = [2**power for power in range(7)], 4, 7

    def points(limit: Callable[[int], float]) -> Sequence[tuple[float, float]]:
        downs = [_HEIGHT * (high - log10(limit(number))) / (high - low) for number in shards]
        return [(round(_RIGHT + _WIDTH * index / 6, 1), round(_TOP + down, 1)) for index, down in enumerate(downs)]

    lines = [_text(_RIGHT, _TOP - 8, "Model: most tasks a second, by shards")]
    for power in range(low, high + 1):
        y = points(lambda _, power=power: 10.0**power)[0][1]  # type: ignore[misc]
        lines.append(f'<line class="grid" x1="{_RIGHT}" y1="{y}" x2="{_RIGHT + _WIDTH}" y2="{y}"/>')
        lines.append(_text(_RIGHT - 6, y + 4, f"{10**power:,}", "end"))
    for part, limit in limits.items():
        plotted = points(limit)
        lines.append(f'<polyline class="{part}" points="{" ".join(f"{x},{y}" for x, y in plotted)}"/>')
        (x, y), anchor = (plotted[-1], "end") if part == "scheduler" else (plotted[0], "start")
        lines.append(_text(x, y - 5, f"{round(limit(shards[-1]), -4):,.0f}", anchor))
    return lines + [_text(x, _TOP + _HEIGHT + 15, str(n), "middle") for (x, _), n in zip(plotted, shards, strict=True)]


if __name__ == "__main__":
    main()
