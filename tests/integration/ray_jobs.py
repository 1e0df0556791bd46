"""What the Ray jobs of tests run."""

from __future__ import annotations

import os
import time
from pathlib import Path


def double(number: int) -> dict[str, int]:
    """Do some work."""
    print("doubling", number)
    return {"doubled": 2 * number}


async def double_later(number: int) -> int:
    """Do some work as a coroutine."""
    return 2 * number


def squares(numbers: list[int]) -> int:
    """Do some work on the cluster."""
    import ray

    @ray.remote(num_cpus=0.1)
    def square(number: int) -> int:
        print("squaring", number)
        return number * number

    return sum(ray.get([square.remote(number) for number in numbers]))


def fail(text: str) -> None:
    """Fail."""
    raise ValueError(text)


def hold(folder: str) -> str:
    """Say that it has begun, and in which process; go on when it is let."""
    with Path(folder, "ran").open("a", encoding="utf-8") as marks:
        marks.write(f"{os.getpid()}\n")
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "held"


def odd() -> object:
    """Return what is no plain data."""
    return object()


def vanish() -> None:
    """End without a word."""
    os._exit(7)
