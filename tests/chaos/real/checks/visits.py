"""Checks that a task enqueued over HTTP with a key exists once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from orchestrator.sdk.values.display import call_of
from tests.chaos.real.project.tasks import work_for


def check_visits(ended: dict[str, Any]) -> Iterator[str]:
    keys = Counter(call_of(bytes(row["payload"]))[0][0] for row in ended.values() if row["name"] == work_for.name)
    for key, number in keys.items():
        if number > 1:
            yield f"{number} tasks were enqueued over HTTP with the one key {key}"
