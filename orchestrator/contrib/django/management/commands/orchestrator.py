"""The command `orchestrator`, with the settings and tasks of the Django project."""

from __future__ import annotations

import os
from typing import Any

from django.core.management.base import BaseCommand

from orchestrator.cli import main
from orchestrator.contrib.django import project_settings


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Passes its arguments to the command line of orchestrator."""

    help = "Run a command of orchestrator, such as worker, scheduler, dev or status."

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command line, with the options of orchestrator, not Django's."""
        values = project_settings() | {
            "app": os.environ.get("ORCHESTRATOR_APP", "orchestrator.contrib.django.worker:app")
        }
        for name, value in values.items():  # also for child processes
            text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
            os.environ[f"ORCHESTRATOR_{name.upper()}"] = text
        main(args=argv[2:], prog_name="manage.py orchestrator")

    def handle(self, *args: Any, **_: Any) -> None:
        """Run the command for `call_command("orchestrator", "status")`."""
        self.run_from_argv(["", "", *args])

    def add_arguments(self, parser: Any) -> None:
        """Accept any arguments."""
        parser.add_argument("args", nargs="*")
