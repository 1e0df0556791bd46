"""Loaded by every process that the tests start.

The driver of Redis imports the metrics of OpenTelemetry if they are installed: a tenth of the time in which a worker
starts, for something that nobody here uses.
"""

import sys

sys.modules["opentelemetry.sdk.metrics"] = None  # type: ignore[assignment]  # as if it were not installed
