"""Everything in one go: embedded Postgres and Redis, a scheduler, a worker, and a small application.

Data lives under `.orchestrator/` in the current folder. All started processes are stopped at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from orchestrator.cli.dev.app_check import is_ready
from orchestrator.embedded import EmbeddedServices
from orchestrator.settings import load_settings
from orchestrator.store.database import upgrade

HERE = Path(__file__).resolve().parent
CHUNKS = [(start, start + 1_000) for start in range(2, 300_000, 1_000)]


def main() -> None:
    console = Console()
    began = time.monotonic()
    with console.status("Starting Postgres and Redis under .orchestrator/ …"):
        services = EmbeddedServices(Path(".orchestrator"))
        services.start()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        upgrade(services.database_url)
        os.environ["ORCHESTRATOR_DATABASE_URL"] = services.database_url
        os.environ["ORCHESTRATOR_REDIS_URL"] = services.redis_url
        command = [sys.executable, "-m", "orchestrator"]
        log = (services.folder / "quickstart.log").open("wb")
        for arguments in (["scheduler"], ["worker", "--app", "tour:app", "--processes", "2"]):
            processes.append(subprocess.Popen([*command, *arguments], cwd=HERE, stdout=log, stderr=log))
        with console.status("Starting a scheduler and a worker …"):
            wait_until_ready(processes, log.name)
        console.print(f"[green]✓[/] Postgres, Redis, a scheduler and a worker run ({time.monotonic() - began:.1f} s)\n")
        run_example(console)
    finally:
        for process in reversed(processes):  # the worker first: its last reports need the scheduler
            process.terminate()
            process.wait(40)
        services.stop()
    console.print("\n[green]✓[/] Stopped. Where to look next:")
    console.print("  examples/tour.py                        the application you just ran")
    console.print("  source .venv/bin/activate; cd examples")
    console.print("  orchestrator dev --app tour:app         everything in one terminal, with logs")
    console.print("  orchestrator enqueue greet Ada --wait   in a second terminal in that folder")
    console.print("  orchestrator status                     and tasks, runs, queues, workers")


def wait_until_ready(processes: list[subprocess.Popen[bytes]], log: str) -> None:
    settings = load_settings()
    deadline = time.monotonic() + 60.0
    while not is_ready(settings, workers=2):
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            sys.exit(f"The scheduler or the worker does not run; {log} says why.")
        time.sleep(0.1)


def run_example(console: Console) -> None:
    sys.path.insert(0, str(HERE))
    from tour import app, count_primes, flaky, greet

    console.print("greet.enqueue('Ada').result()   ", greet.enqueue("Ada").result(timeout=30))
    console.print("flaky.enqueue(0.3).result()     ", flaky.enqueue(0.3).result(timeout=60))
    run = app.start_many(count_primes, CHUNKS, name="primes")
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("count_primes", total=len(CHUNKS))
        while (state := run.progress()).status in ("pending", "running"):
            progress.update(bar, completed=state.counters.ended)
            time.sleep(0.05)
        progress.update(bar, completed=state.counters.ended)
    total = sum(run.results())
    console.print(f"app.start_many(count_primes, …)  {len(CHUNKS)} tasks, {total:,} primes below 300,000")
    app.close()


if __name__ == "__main__":
    main()
