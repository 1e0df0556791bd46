"""Celery for tests, installed outside the environment: its pinned packages conflict with the newer ones in it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / ".venv-bench" / "celery-packages"
_PACKAGES = "celery kombu vine amqp billiard click-didyoumean click-plugins click-repl prompt-toolkit wcwidth tzlocal"


def require_celery() -> None:
    """Make Celery importable in this process and its child processes, or skip the tests of the module."""
    if importlib.util.find_spec("celery") is not None:
        return
    if not FOLDER.exists():
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            arguments = ["install", "-q", "--no-deps", "--target", f"{folder}/packages", *_PACKAGES.split()]
            result = subprocess.run(
                [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
            )
            if result.returncode:
                pytest.skip(f"Celery cannot be installed: {result.stderr[-300:]}", allow_module_level=True)
            if not FOLDER.exists():
                Path(folder, "packages").rename(FOLDER)
    sys.path.append(str(FOLDER))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER)]))
