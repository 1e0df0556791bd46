"""Jobs written for RQ, with only the imports changed."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.compat.rq import Queue, Retry, get_current_job
from orchestrator.compat.rq.decorators import job

queue = Queue("mail")


def send(to: str, at: datetime | None = None, *, copies: int = 1) -> dict[str, Any]:
    """Return the arguments and the type of `at`."""
    return {"to": to, "is_time": isinstance(at, datetime), "copies": copies}


async def later(number: int) -> int:
    return number + 1


def fail(text: str) -> None:
    raise ValueError(text)


def flaky(folder: str, failures: int) -> int:
    """Fail the first `failures` attempts."""
    path = Path(folder, "tries")
    with path.open("a") as file:
        file.write("x")
    tries = len(path.read_text())
    if tries <= failures:
        raise OSError(f"try {tries}")
    return tries


def again(folder: str) -> int | Retry:
    """Return a Retry at the first call."""
    path = Path(folder, "again")
    if path.exists():
        return 2
    path.touch()
    return Retry(max=1, interval=0)


def note(folder: str, word: str) -> None:
    with Path(folder, "words").open("a") as file:
        file.write(f"{word}\n")


def step(folder: str, total: int) -> str:
    """Save progress in the job's metadata, then wait as `hold` does."""
    job = get_current_job()
    assert job is not None
    job.meta["done"] = total
    job.save_meta()
    return hold(folder)


def hold(folder: str) -> str:
    """Create `began`, and wait for the file `go`."""
    Path(folder, "began").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "held"


def block(folder: str) -> None:
    """Create `began`, and block in one call that nothing interrupts."""
    Path(folder, "began").touch()
    time.sleep(120)


def give(value, *others):  # type: ignore[no-untyped-def]
    """Return the first argument, and the types of the others."""
    return value, [type(one).__name__ for one in others]


def named(path: Path, when):  # type: ignore[no-untyped-def]
    return [isinstance(path, Path), type(when).__name__]


def make(kind: str) -> Any:
    return Path(kind)


def sum_up() -> list[Any]:
    """Return the sorted results of the jobs that this job depends on."""
    job = get_current_job()
    assert job is not None
    return sorted(one.return_value() for one in job.fetch_dependencies())


def spawn(number: int) -> str:
    return queue.enqueue(later, number).id


@job("mail", timeout=20)
def decorated(word: str) -> str:
    return word.upper()


def on_success(job: Any, connection: Any, result: Any) -> None:
    note(job.kwargs["folder"], f"success {job.id} {result}")


def on_failure(job: Any, connection: Any, kind: Any, value: Any, traceback: Any) -> None:
    note(job.kwargs["folder"], f"failure {kind.__name__} {value}")


def on_stopped(job: Any, connection: Any) -> None:
    note(job.args[0], "stopped")


def on_timeout(job: Any, connection: Any, kind: Any, value: Any, traceback: Any) -> None:
    note(job.args[0], f"failure {kind.__name__}")


def with_folder(value: str, folder: str) -> str:
    """Return a value, or fail for `bad`."""
    if value == "bad":
        raise KeyError(value)
    return value
