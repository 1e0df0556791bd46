"""The parts of a client's backend are loaded on first use."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from orchestrator.sdk.backend import Backend
from orchestrator.settings import Settings

_SETTINGS = Settings(database_url="postgresql://nobody@localhost:1/none", redis_url="redis://localhost:1/0")
_FIRST_USE = """
import sys
from orchestrator import Orchestrator
app = Orchestrator(database_url="postgresql://nobody@localhost:1/none", redis_url="redis://localhost:1/0")
app._client.backend.tasks
heavy = {"sqlalchemy.orm", "yaml", "orchestrator.store.insights", "orchestrator.domain.dag.plan"}
heavy |= {"orchestrator.domain.schedules.cron"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
app._client.backend.schedules
assert "orchestrator.domain.schedules.cron" in sys.modules
"""


@pytest.mark.slow
def test_the_first_enqueue_imports_no_modules_of_schedules_or_workflows() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_part_is_created_once_for_all_threads() -> None:
    backend = Backend(_SETTINGS)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(backend.runs)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(part) for part in (*found, backend.runs)}) == 1
    backend.close()
