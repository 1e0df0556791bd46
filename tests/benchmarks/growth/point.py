"""The process that measures one axis: `python -m tests.benchmarks.growth.point pending 1000 10000`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from tests.benchmarks.growth.axes import AXES
from tests.benchmarks.growth.stand import standing

_SECONDS = {"leader", "postgres", "redis", "worker"}


def main(axis: str, sizes: Iterable[int]) -> None:
    """Print the costs of a unit of work for each size: microseconds, counts, bytes, and the leader's memory in MB."""
    with standing() as stand:
        for size in sizes:
            found, units = AXES[axis].measure(stand, size)
            memory = found.pop("memory")
            costs = {name: used / units * (1e6 if name in _SECONDS else 1) for name, used in found.items()}
            print(json.dumps([size, costs | {"memory": memory}]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], map(int, sys.argv[2:]))
