"""Times as people say them; they are the same on a page of the dashboard."""

from __future__ import annotations

from orchestrator.monitoring.times import ago, between, duration, present, when

__all__ = ["ago", "between", "duration", "present", "when"]
