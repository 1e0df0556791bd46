"""Declaring tasks and workflows reads no settings, so that a program may set them after its imports."""

from __future__ import annotations

import pytest

from orchestrator import Orchestrator, WorkflowContext


def test_declaring_reads_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_LEASE", "no number")
    app = Orchestrator()

    @app.task(redact=("token",))
    def pay(token: str) -> None:
        del token

    @app.workflow
    async def order(ctx: WorkflowContext) -> None:
        del ctx

    pay.options(priority=3)
    assert app._client._settings is None
