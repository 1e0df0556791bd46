"""Task loggers. Records are stored with the task: `orchestrator tasks logs ID`."""

from __future__ import annotations

import logging

base_logger = logging.getLogger("celery")
task_logger = logging.getLogger("celery.task")


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


get_task_logger = get_logger
