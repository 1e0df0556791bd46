"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

from orchestrator.testing.waiting import eventually

__all__ = ["eventually"]
