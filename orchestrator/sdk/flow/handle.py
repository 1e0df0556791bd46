"""A run of a flow, as its program holds it."""

from __future__ import annotations

from typing import Any, NoReturn
from uuid import UUID

from orchestrator.domain.flow.decisions import APPROVED, REJECTED
from orchestrator.errors import RunFailed, WrongState
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Steps


class FlowHandle(RunHandle[Any]):
    """One run of a flow. What it comes to is its shared state: `results` and `outputs` of other runs refuse here."""

    def __repr__(self) -> str:
        return f"<FlowHandle {UUID(bytes=self._id)}{self._client.via}>"

    @blocking
    def result(self, timeout: float | None = None) -> Steps[dict[str, Any]]:
        """Wait for the end and return the shared state; raise RunFailed if it did not succeed."""
        state = yield from self._wait_ended(timeout)
        if state != "success":
            view = self._client.backend.flows.show(self._id)
            reason = f": {view.reason}" if view.reason else ""
            raise RunFailed(f"{self!r} ended as {state}{reason} See `orchestrator flows show {self.id}`.")
        return self.shared()

    def shared(self) -> dict[str, Any]:
        """Return the shared state as it is now."""
        shared: dict[str, Any] = self._client.backend.flows.shared(self._id)
        return shared

    def cursor(self) -> str:
        """Return the node at which it stands, behind those above it; an empty text if it stands at none."""
        return self._client.backend.flows.show(self._id).cursor

    def signal(self, key: str, value: Any = True, *, why: str = "") -> None:
        """Send a value under a key. If no node waits for it yet, it is there when one does."""
        self._client.backend.flows.signal(self._id, key, value, why)

    def approve(self, *, why: str = "", node: str | None = None) -> None:
        """Approve what it waits for; or what it will wait for, if the node is named."""
        self._client.backend.flows.decide(self._id, APPROVED, why, node)

    def reject(self, *, why: str = "", node: str | None = None) -> None:
        """Reject what it waits for; or what it will wait for, if the node is named."""
        self._client.backend.flows.decide(self._id, REJECTED, why, node)

    def rerun(self, from_step: str | None = None) -> FlowHandle:
        """Start it over as a new run, with its version, parameters and tags; it begins at its start."""
        new = new_id()
        self._client.backend.runs.rerun(self._id, new, from_step)
        return FlowHandle(self._client, new)

    async def arerun(self, from_step: str | None = None) -> FlowHandle:
        """Do the same as `rerun` without blocking the event loop."""
        return await self._client.threads.run(self.rerun, from_step)

    def _iter_results(self, *_: object) -> NoReturn:
        """Refuse: what a flow comes to is its shared state, and no list of results."""
        raise self._no_list()

    def outputs(self, timeout: float | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse: a node may be visited many times, and has an output for each."""
        raise self._no_list()

    async def aoutputs(self, timeout: float | None = None) -> NoReturn:
        """Refuse, as `outputs` does."""
        self.outputs(timeout)

    def _no_list(self) -> WrongState:
        return WrongState(
            f"{self!r} is a run of a flow, which has no list of results: what its nodes give stands in its shared "
            f"state. Use result() for that at its end, shared() for that now, or `orchestrator flows show {self.id} "
            f"--json` for each visit to a node."
        )

    aresult = async_variant(result)
    ashared = async_variant(shared)
    acursor = async_variant(cursor)
    asignal = async_variant(signal)
    aapprove = async_variant(approve)
    areject = async_variant(reject)
