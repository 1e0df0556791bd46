"""Every statement that the leader prepares is planned without a scan of a large table, whatever the statistics.

No statement runs here, and the list is not kept by hand: a new statement is planned, too. `test_plans….py` measure what
the hot statements read.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator import scheduler, store
from orchestrator.embedded import EmbeddedServices
from orchestrator.store.driver import channel
from orchestrator.store.sql import BATCH, Prepared
from tests.integration import test_plans_of_code, test_plans_of_queues
from tests.integration.planning import STATISTICS, Leader, leaders_of, nodes

WORK = {
    *("tasks_in_flight", "tasks_held", "tasks_due", "tasks_expiring", "timers_due", "schedules_due", "inbox_pkey"),
    *("runs_pending", "runs_expanding", "runs_cancelling", "runs_closing", "runs_due", "runs_stuck", "backfills_open"),
    *("untold_by_turns", "untold_of_run"),
}
"""Indexes that contain only pending work: the leader reads them from the front."""
SMALL = {"leases", "queues", "drains", "workers", "tasks_seq_seq"}
_SHARED = "CREATE TABLE orchestrator.lane_use (name text, shard int, held int NOT NULL, PRIMARY KEY (name, shard))"
FILL = [_SHARED, *test_plans_of_code.FILL, *test_plans_of_queues.FILL]
"""With the table that the leaders of several shards share."""


@pytest.fixture(scope="module")
def leaders(services: EmbeddedServices) -> Iterator[Callable[[str], Leader]]:
    with leaders_of(services, FILL, test_plans_of_code.begin, {}) as found:
        yield found


_OF_SHARDS = "orchestrator.all_runs"
"""A view that exists only with several shards; so do its statements."""


def prepared() -> list[Prepared[Any]]:
    """Return the prepared statements of the product's modules, without those that tests have prepared."""
    found: dict[int, Prepared[Any]] = {}
    for package in (store, scheduler):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
                statements = [
                    getattr(one, "statement", one) for one in values
                ]  # functions hold their statement in an attribute
                found |= {id(one): one for one in statements if isinstance(one, Prepared) and _OF_SHARDS not in one.sql}
    batches = ((one, tuple(dict.fromkeys(first for _, first in BATCH.findall(one.sql)))) for one in found.values())
    return [*found.values(), *(one.of_one_row(firsts) for one, firsts in batches if firsts)]


_FIRST_ENTRY = {"tasks.ready_queues"}
"""Statements that read the first entry of an index, without a condition."""


def is_whole_table(node: dict[str, Any]) -> bool:
    """Return whether a node of a plan may read a whole large table."""
    if (
        node.get("Relation Name", "leases") in SMALL
        or "Scan" not in node["Node Type"]
        or node["Node Type"] == "Tid Scan"
    ):
        return False
    return "Index Cond" not in node and node.get("Index Name") not in WORK


@pytest.mark.parametrize("state", STATISTICS)
def test_no_plan_scans_a_large_table(leaders: Callable[[str], Leader], state: str) -> None:
    connection = leaders(state).connection
    statements = prepared()
    assert len(statements) > 100
    found: list[tuple[str, dict[str, Any]]] = []
    for statement in (one for one in statements if one.name not in _FIRST_ENTRY):
        statement._text(connection, channel(connection), "")
        nulls = ", ".join(f"NULL{cast}" for cast in statement._casts.values())
        explain = f'EXPLAIN (FORMAT JSON) EXECUTE "{statement.name}"' + (f"({nulls})" if nulls else "")
        plan = connection.exec_driver_sql(explain).scalar_one()[0]["Plan"]
        found += [(statement.name, node) for node in nodes(plan) if is_whole_table(node)]
    assert found == []
