"""Shards: what a task takes of each process with one, two and four of them, and how fast they are together.

On a machine that others use too, CPU time by process says more than rates do. The scheduler's share divides by the
number of shards where there are cores for them: the busiest part of a whole system says what saturates first.
Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.together import APPLICATION, REPOSITORY, _cpu, _said, _stopped_at_the_end

BATCH = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--size", type=int, default=20_000, help="tasks of one round")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    from orchestrator.embedded import EmbeddedServices

    with tempfile.TemporaryDirectory(prefix="shards-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "application.py").write_text(APPLICATION)
        with EmbeddedServices(folder / "services") as services:
            for _ in range(options.rounds):
                for number in options.numbers:
                    url = services.postgres.create_database(f"shards_{os.urandom(6).hex()}")
                    os.environ |= {
                        "PYTHONPATH": str(REPOSITORY),
                        "ORCHESTRATOR_DATABASE_URL": url,
                        "ORCHESTRATOR_REDIS_URL": services.redis_url,
                        "ORCHESTRATOR_NAMESPACE": f"shards_{os.urandom(4).hex()}",
                        "ORCHESTRATOR_SHARDS": str(number),
                    }
                    servers = {"postgres": services.postgres.pid, "redis": services.redis.pid}
                    print(f"{number} shards: {measure(folder, servers, options.size, number)}", flush=True)


def measure(folder: Path, servers: dict[str, int], size: int, shards: int) -> str:
    """Run so many tasks that wait already, from the start of the workers to the last end."""
    sys.path.insert(0, str(folder))
    import application  # type: ignore[import-not-found]  # which the program has written

    orchestrator = [sys.executable, "-m", "orchestrator"]
    subprocess.run([*orchestrator, "db", "upgrade"], cwd=folder, check=True, capture_output=True)
    application.app.close()
    application.app._client._settings = None
    application.app.queue("default").pause()
    for start in range(0, size, BATCH):
        application.app.enqueue_many(application.noop, [(one,) for one in range(start, start + BATCH)])
    parts = dict(servers)
    with _stopped_at_the_end() as running:
        for name, words, ready in (
            ("scheduler", ["scheduler"], "scheduler.leading"),
            ("worker", ["worker", "--app", "application:app", "--processes", "4"], "process.ready"),
        ):
            log = folder / f"{name}.log"
            with log.open("wb") as output:
                process = subprocess.Popen([*orchestrator, *words], cwd=folder, stdout=output, stderr=output)
            running.append(process)
            parts[name] = process.pid
            while log.read_text().count(ready) < (shards if name == "scheduler" else 4):
                _said(log, ready, process)
                time.sleep(0.05)
        before = {part: _cpu(process) for part, process in parts.items()}
        began = time.monotonic()
        application.app.queue("default").resume()
        while application.app.queue("default").open():
            time.sleep(0.1)
        seconds = time.monotonic() - began
        used = {part: (_cpu(process) - before[part]) / size * 1e6 for part, process in parts.items()}
    application.app.close()
    return f"{size / seconds:,.0f} tasks/s; µs of CPU a task: " + ", ".join(f"{k} {v:.0f}" for k, v in used.items())


if __name__ == "__main__":
    main()
