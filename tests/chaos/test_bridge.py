"""A short run of `python -m tests.chaos.bridge`."""

# ruff: noqa: E402  # Celery is importable only after `require_celery`

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.celery_packages import require_celery

require_celery()

from tests.chaos.bridge.__main__ import run


@pytest.mark.long
def test_killing_any_process_neither_loses_nor_repeats_a_task() -> None:
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-bridge-"))
    folder.chmod(0o755)

    verdict = run(7, 1, folder)

    assert verdict.is_good, f"{verdict} See {folder}"
    shutil.rmtree(folder)
