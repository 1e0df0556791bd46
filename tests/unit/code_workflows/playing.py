"""Run a workflow in memory from a synchronous test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from orchestrator import CodeWorkflow
from orchestrator.testing import TestedRun, WorkflowTest
from orchestrator.testing.workflows import Mocks

T = TypeVar("T")


def played(workflow: CodeWorkflow[..., T], *args: Any, mocks: Mocks | None = None) -> T:
    """Run a workflow to its end and return its result."""

    async def play() -> T:
        async with WorkflowTest() as test:
            return await test.run(workflow, *args, mocks=mocks)

    return asyncio.run(play())


def started(
    workflow: CodeWorkflow[..., Any],
    then: Callable[[TestedRun[Any], WorkflowTest], Awaitable[T]],
    *args: Any,
    mocks: Mocks | None = None,
) -> T:
    """Start a workflow, and pass the run to an asynchronous test function."""

    async def play() -> T:
        async with WorkflowTest() as test:
            return await then(await test.start(workflow, *args, mocks=mocks), test)

    return asyncio.run(play())
