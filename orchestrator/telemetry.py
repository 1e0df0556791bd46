"""Logging as people read it: one line per event, on stderr, with the process's role in front."""

from __future__ import annotations

import logging
import sys

LOGGER_NAME = "orchestrator"


def get_logger(role: str) -> logging.Logger:
    """Return the logger of one role: scheduler, worker, client."""
    return logging.getLogger(f"{LOGGER_NAME}.{role}")


def configure_logging(level: str = "INFO") -> None:
    """Send the package's log to stderr; called by the commands, never by the library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
