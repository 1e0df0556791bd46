"""The published flow graphs of an application, and runs of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

import msgspec

from orchestrator.domain.dag.definition import Registered
from orchestrator.domain.flow.checks import KnownNames
from orchestrator.domain.flow.decisions import APPROVED, REJECTED
from orchestrator.domain.flow.definition import Flow, body_of, functions_of
from orchestrator.domain.tasks.starts import StartSteps
from orchestrator.errors import NotFound, RunFailed, WrongState
from orchestrator.sdk.catalogue import Catalogue, start_run
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.client import Client
from orchestrator.sdk.dag.registered import options_of_node, redacting_alike
from orchestrator.sdk.ids import new_id, parse_id
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.sdk.values.sorting import sorted_sets
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Steps

if TYPE_CHECKING:
    from orchestrator.sdk.flow.builder import FlowGraph


class Flows(Catalogue["StartableFlow"]):
    """`app.flows`: the published flow graphs, by name."""

    def __getitem__(self, name: str) -> StartableFlow:
        return StartableFlow(self._client, check_name("flow", name))

    def names(self) -> list[str]:
        return [summary.name for summary in self._client.backend.flows.names()]

    def publish(self, name: str, source: FlowGraph | Mapping[str, Any] | str | Path) -> int:
        """Store a flow, built in Python, given as data, or read from a file, and return its version. An unchanged flow
        is a no-op.

        The options of the application's tasks (retries, limits, queues) are copied as part of the version. If the
        application has tasks, a node with an unknown `local_func` is refused. Flows that the flow names are embedded in
        their current version.
        """
        flow = self.read(source)
        return self._client.backend.flows.publish(check_name("flow", name), flow).version

    def read(self, source: FlowGraph | Mapping[str, Any] | str | Path) -> Flow:
        """Return a flow as it would be published, or raise InvalidWorkflow with all its problems."""
        from orchestrator.sdk.flow import reading  # loads the YAML parser, which workers do without

        self._registry.modules.load()
        tasks = self._registry.tasks
        known = KnownNames(functions=tasks) if tasks else KnownNames()
        if isinstance(source, (str, Path)):
            flow = reading.load(Path(source), known, self._find)
        else:
            plain = dict(source) if isinstance(source, Mapping) else source.to_data()
            flow = reading.from_data(plain, known=known, find=self._find)
        used = sorted(functions_of(flow) & tasks.keys())
        functions = redacting_alike({name: options_of_node(tasks[name]) for name in used})
        non_default = {name: function for name, function in functions.items() if function != Registered()}
        takes = {name: names for name in used if (names := tasks[name]._signature.takes) is not None}
        return msgspec.structs.replace(flow, functions=non_default, takes=takes)

    def _find(self, name: str, version: int | None) -> tuple[int, dict[str, Any]] | None:
        flows = self._client.backend.flows
        try:
            stored = flows.latest(name) if version is None else flows.read(name, version)
        except NotFound:
            return None
        return stored.version, body_of(stored.flow)

    def run(self, run_id: str | UUID) -> FlowHandle:
        return FlowHandle(self._client, parse_id("run", run_id))

    anames = async_variant(names)
    apublish = async_variant(publish)


class StartableFlow:
    """A published flow. Runs start with its newest version, unless `options` chooses another."""

    def __init__(
        self,
        client: Client,
        name: str,
        version: int | None = None,
        key: str | None = None,
        tags: tuple[str, ...] = (),
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self.name = name
        """The name of the flow."""
        self._version = version
        self._key = key
        self._tags = tags
        self._shared = shared

    def __repr__(self) -> str:
        return f"<Flow {self.name}>"

    def options(
        self,
        *,
        version: int | None = None,
        key: str | None = None,
        tags: tuple[str, ...] | list[str] = (),
        shared: Mapping[str, Any] | None = None,
    ) -> StartableFlow:
        """Return a copy of this flow with a version, an idempotency key, tags or an initial shared state."""
        key = None if key is None else check_label("key", key)
        return StartableFlow(self._client, self.name, version, key, check_tags(tags), shared)

    def definition(self) -> Flow:
        return self._client.backend.flows.latest(self.name).flow

    def start(self, /, **params: Any) -> FlowHandle:
        """Start a run. The run is durable when this returns. Inside a task, the scheduler starts it."""
        key, tags, version, shared = self._key, self._tags, self._version, self._shared
        if key is not None:
            params = sorted_sets(params)  # they are compared with those of another start with the same key
        if shared and self._client.runtime() is not None:
            raise WrongState(
                f"Flow {self.name!r} cannot be started inside a task with an initial shared state: give it "
                f"parameters, and let its first node write them."
            )

        def create(run_id: bytes) -> bytes:
            flows = self._client.backend.flows
            return flows.start(self.name, params, run_id, version=version, key=key, tags=tags, shared=shared)

        start = StartSteps(self.name, key=key, tags=tags, flow=True, version=version)
        return FlowHandle(self._client, start_run(self._client, start, params, create))

    def signal(self, run_id: str | UUID, key: str, value: Any = True, *, why: str = "") -> None:
        self._run(run_id).signal(key, value, why=why)

    def approve(self, run_id: str | UUID, *, why: str = "", node: str | None = None) -> None:
        self._run(run_id).approve(why=why, node=node)

    def reject(self, run_id: str | UUID, *, why: str = "", node: str | None = None) -> None:
        self._run(run_id).reject(why=why, node=node)

    def _run(self, run_id: str | UUID) -> FlowHandle:
        return FlowHandle(self._client, parse_id("run", run_id))

    adefinition = async_variant(definition)
    astart = async_variant(start)
    asignal = async_variant(signal)
    aapprove = async_variant(approve)
    areject = async_variant(reject)


class FlowHandle(RunHandle[Any]):
    """A run of a flow. Its result is its shared state; `results` and `outputs` are not available."""

    def __repr__(self) -> str:
        return f"<FlowHandle {UUID(bytes=self._id)}{self._client.via}>"

    @blocking
    def result(self, timeout: float | None = None) -> Steps[dict[str, Any]]:
        """Wait for the end and return the shared state. Raise RunFailed if the run did not succeed."""
        state = yield from self._wait_ended(timeout)
        if state != "success":
            view = self._client.backend.flows.show(self._id)
            reason = f": {view.reason}" if view.reason else ""
            raise RunFailed(f"{self!r} ended as {state}{reason} See `orchestrator flows show {self.id}`.")
        return self.shared()

    def shared(self) -> dict[str, Any]:
        """Return the current shared state."""
        shared: dict[str, Any] = self._client.backend.flows.shared(self._id)
        return shared

    def cursor(self) -> str:
        """Return the current node, after the names of its parent nodes; empty if there is none."""
        return self._client.backend.flows.show(self._id).cursor

    def signal(self, key: str, value: Any = True, *, why: str = "") -> None:
        """Send a value under a key. If no node waits for it yet, it is kept for the first that does."""
        self._client.backend.flows.signal(self._id, key, value, why)

    def approve(self, *, why: str = "", node: str | None = None) -> None:
        """Approve the node that waits for an approval, or the named node, even before it waits."""
        self._client.backend.flows.decide(self._id, APPROVED, why, node)

    def reject(self, *, why: str = "", node: str | None = None) -> None:
        """Reject the node that waits for an approval, or the named node, even before it waits."""
        self._client.backend.flows.decide(self._id, REJECTED, why, node)

    def rerun(self, from_step: str | None = None) -> FlowHandle:
        """Start a new run from the beginning, with the same version, parameters and tags."""
        new = new_id()
        self._client.backend.runs.rerun(self._id, new, from_step)
        return FlowHandle(self._client, new)

    async def arerun(self, from_step: str | None = None) -> FlowHandle:
        """Like `rerun`, without blocking the event loop."""
        return await self._client.threads.run(self.rerun, from_step)

    def _iter_results(self, *_: object) -> NoReturn:
        """Raise WrongState: the result of a flow is its shared state, not a list."""
        raise self._no_list_error()

    def outputs(self, timeout: float | None = None) -> NoReturn:  # noqa: ARG002
        """Raise WrongState: a node may be visited many times, with an output for each visit."""
        raise self._no_list_error()

    async def aoutputs(self, timeout: float | None = None) -> NoReturn:
        """Raise WrongState, as `outputs` does."""
        self.outputs(timeout)

    def _no_list_error(self) -> WrongState:
        return WrongState(
            f"{self!r} is a run of a flow, which has no list of results: the results of its nodes are stored in "
            "its shared state. Use result() for that state at the end, shared() for the current state, or "
            f"`orchestrator flows show {self.id} --json` for each visit to a node."
        )

    aresult = async_variant(result)
    ashared = async_variant(shared)
    acursor = async_variant(cursor)
    asignal = async_variant(signal)
    aapprove = async_variant(approve)
    areject = async_variant(reject)
