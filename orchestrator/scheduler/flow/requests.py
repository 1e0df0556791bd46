"""Signals and timers of runs of flows."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence

from orchestrator.domain.code import history
from orchestrator.domain.code.history import Fact
from orchestrator.domain.runs.changes import RunChanges
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.inbox import Request


def signal(tx: Transaction, runs: Runs, items: Sequence[Request]) -> None:
    """Hand signals to runs of flows, in their order; one that has ended does not hear them."""
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for item in items:
        facts[item.target].append(history.SignalReceived(item.body["key"], base64.b64decode(item.body["value"])))
    tell(tx, runs, facts)


def tell(tx: Transaction, runs: Runs, facts: Mapping[bytes, Sequence[Fact]]) -> None:
    """Tell runs of flows what happened to them beside their tasks."""
    some = [(run, [RunChanges(facts=list(learned), of_flow=True)]) for run, learned in facts.items()]
    if some:
        runs.tell(tx, some)
        runs.advance(tx)
