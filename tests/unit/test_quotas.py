"""Quotas of API keys: when a request is rejected, and for how long."""

from __future__ import annotations

import pytest

from orchestrator.domain.quotas import DEFAULTS, Quotas, Usage, parse_quotas
from orchestrator.errors import ConfigurationError


def test_requests_above_the_rate_are_rejected_until_the_rate_allows_them() -> None:
    used = Usage(Quotas(rate=2))
    for _ in range(20):
        assert used.begin(100.0) is None
        used.in_flight -= 1
    exceeded = used.begin(100.0)
    assert exceeded is not None
    assert exceeded.retry_after is not None
    assert used.begin(100.0 + exceeded.retry_after + 1e-6) is None


def test_concurrent_requests_and_bytes_are_bounded() -> None:
    used = Usage(Quotas(concurrent=1, megabytes=6))
    assert used.begin(0.0) is None
    assert "concurrent" in str(used.begin(0.0))
    used.in_flight -= 1
    used.bytes.spend(12_000_000)
    exceeded = used.begin(0.0)
    assert exceeded is not None
    assert exceeded.retry_after == pytest.approx(60, abs=0.1)
    assert used.begin(59.0) is not None
    assert used.begin(61.0) is None


def test_event_streams_are_bounded_separately_from_requests() -> None:
    used = Usage(Quotas(concurrent=1, streams=1))
    assert (used.listen(), used.begin(0.0)) == (None, None)
    assert "quota streams" in str(used.listen())
    used.streams -= 1
    assert used.listen() is None


def test_tasks_are_limited_by_priority_open_tasks_and_queues() -> None:
    used = Usage(Quotas(priority=5, open_tasks=10, queues=2))
    assert used.enqueue({"a": 1}, 5, {}, 0.0) is None
    above = used.enqueue({"a": 1}, 6, {}, 0.0)
    assert above is not None
    assert above.retry_after is None
    assert used.enqueue({"a": 3}, 0, {"a": 7}, 0.0) is None
    assert "open_tasks" in str(used.enqueue({"a": 4}, 0, {"a": 7}, 0.0))
    assert used.enqueue({"b": 1}, 0, {}, 0.0) is None
    assert "quota queues" in str(used.enqueue({"a": 1, "c": 1}, 0, {}, 0.0))
    assert used.enqueue({"a": 1, "b": 1}, 0, {}, 0.0) is None
    assert used.enqueue({"c": 1}, 0, {}, 4_000.0) is None


def test_quotas_are_parsed_from_text() -> None:
    assert parse_quotas([]) == DEFAULTS
    assert parse_quotas(["rate=10", "priority = 0"]) == Quotas(rate=10, priority=0)
    with pytest.raises(ConfigurationError, match="Did you mean 'priority'"):
        parse_quotas(["prioity=1"])
    with pytest.raises(ConfigurationError, match=r"rate"):
        parse_quotas(["rate=0"])
