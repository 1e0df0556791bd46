"""The application of `talking`, with its own logging configuration."""

from __future__ import annotations

import logging.config
import sys

logging.config.dictConfig(
    {
        "version": 1,
        "formatters": {"own": {"format": "own %(task_name)s|%(task_id)s|%(message)s"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "stream": sys.stdout, "formatter": "own"}},
        "root": {"level": "DEBUG", "handlers": ["out"]},
    }
)

from talking import app as app  # noqa: E402  # `dictConfig` disables loggers that exist before
