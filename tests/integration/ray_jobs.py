"""Functions that the Ray jobs of tests run."""

from __future__ import annotations

import os
import time
from pathlib import Path


def double(number: int) -> dict[str, int]:
    print("doubling", number)
    return {"doubled": 2 * number}


async def double_later(number: int) -> int:
    return 2 * number


def squares(numbers: list[int]) -> int:
    """Compute squares in Ray tasks on the cluster."""
    import ray

    @ray.remote(num_cpus=0.1)
    def square(number: int) -> int:
        print("squaring", number)
        return number * number

    return sum(ray.get([square.remote(number) for number in numbers]))


def fail(text: str) -> None:
    raise ValueError(text)


def hold(folder: str) -> str:
    """Append the process id to `ran`, and wait for the file `go`."""
    with Path(folder, "ran").open("a", encoding="utf-8") as marks:
        marks.write(f"{os.getpid()}\n")
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "held"


def odd() -> object:
    """Return a value that cannot be serialized."""
    return object()


def vanish() -> None:
    """Exit without a result."""
    os._exit(7)
