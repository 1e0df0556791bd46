"""Loaded by every process that the tests start.

The Redis driver imports OpenTelemetry's metrics if they are installed: a tenth of the start time of a worker, for
metrics that no test uses.
"""

import sys

sys.modules["opentelemetry.sdk.metrics"] = None  # type: ignore[assignment]  # hides the package
