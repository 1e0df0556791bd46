"""Measures points of axes, each axis in its own process and database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.benchmarks.bench.programs import Failed
from tests.benchmarks.bench.services import Services
from tests.benchmarks.growth.axes import AXES

Costs = Mapping[str, float]
"""The costs of a unit of work, by resource."""


def grow(
    services: Services, axes: Sequence[str], announce: Callable[[str], None], quick: bool
) -> dict[str, dict[int, Costs]]:
    """Return the costs by axis and size; with `quick`, at two sizes only."""
    found: dict[str, dict[int, Costs]] = {}
    for axis in axes:
        sizes = AXES[axis].sizes
        found[axis] = dict(_points(services, axis, (sizes[0], sizes[len(sizes) // 2]) if quick else sizes, announce))
    return found


def _points(
    services: Services, axis: str, sizes: Sequence[int], announce: Callable[[str], None]
) -> Iterator[tuple[int, Costs]]:
    folder, environ = services.fresh()
    folder.mkdir(parents=True)
    environ["GROWTH_POSTGRES"] = str(services.embedded.postgres.pid)
    environ["ORCHESTRATOR_WORKER_TTL"] = "60"  # heartbeats of a simulated fleet may be late
    environ["GROWTH_REDIS"] = str(services.embedded.redis.pid)
    command = [sys.executable, "-P", "-m", "tests.benchmarks.growth.point", axis, *map(str, sizes)]
    with (folder / "point.log").open("w+") as log:
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log, text=True) as point:
            assert point.stdout is not None
            for size in sizes:
                announce(f"{axis}: {size:,}")
                if line := point.stdout.readline():
                    yield size, json.loads(line)[1]
        services.drop(environ)
        if point.returncode != 0:
            log.seek(0)
            raise Failed(f"{axis}: {log.read()[-5000:]}")
