"""Flow graphs of an application: published ones by name, and runs of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from orchestrator.domain.dag.definition import Registered
from orchestrator.domain.flow.checks import Known
from orchestrator.domain.flow.definition import Flow, body_of, functions_of
from orchestrator.domain.tasks.starts import StartSteps
from orchestrator.errors import NotFound, WrongState
from orchestrator.sdk.catalogue import Catalogue, start_run
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.client import Client
from orchestrator.sdk.dag.registered import hiding_alike, of_function
from orchestrator.sdk.flow.handle import FlowHandle
from orchestrator.sdk.ids import parse_id
from orchestrator.sdk.waiting.async_variants import async_variant

if TYPE_CHECKING:
    from orchestrator.sdk.flow.builder import FlowGraph


class Flows(Catalogue["StartableFlow"]):
    """`app.flows`: the flow graphs that have been published, by name."""

    def __getitem__(self, name: str) -> StartableFlow:
        return StartableFlow(self._client, check_name("flow", name))

    def names(self) -> list[str]:
        """Return the names of all that have been published."""
        return [found.name for found in self._client.backend.flows.names()]

    def publish(self, name: str, source: FlowGraph | Mapping[str, Any] | str | Path) -> int:
        """Store a flow, built in Python, as data, or written in a file; return its version. The same again is a no-op.

        What the application's tasks say of themselves, their retries, limits and queues, is a part of the version.
        Where it has tasks, a node that runs another `local_func` is refused. Flows that it names stand in it from then
        on, in the version that they have now.
        """
        flow = self.read(source)
        return self._client.backend.flows.publish(check_name("flow", name), flow).version

    def read(self, source: FlowGraph | Mapping[str, Any] | str | Path) -> Flow:
        """Return a flow as it would be published, or raise InvalidWorkflow with everything that is wrong."""
        from orchestrator.sdk.flow import reading  # loads the YAML parser, which workers do without

        self._registry.modules.load()
        tasks = self._registry.tasks
        known = Known(functions=tasks) if tasks else Known()
        if isinstance(source, (str, Path)):
            flow = reading.load(Path(source), known, self._find)
        else:
            plain = dict(source) if isinstance(source, Mapping) else source.to_data()
            flow = reading.from_data(plain, known=known, find=self._find)
        used = sorted(functions_of(flow) & tasks.keys())
        functions = hiding_alike({name: of_function(tasks[name]) for name in used})
        said = {name: function for name, function in functions.items() if function != Registered()}
        takes = {name: names for name in used if (names := tasks[name]._signature.takes) is not None}
        return msgspec.structs.replace(flow, functions=said, takes=takes)

    def _find(self, name: str, version: int | None) -> tuple[int, dict[str, Any]] | None:
        flows = self._client.backend.flows
        try:
            found = flows.latest(name) if version is None else flows.read(name, version)
        except NotFound:
            return None
        return found.version, body_of(found.flow)

    def run(self, run_id: str | UUID) -> FlowHandle:
        """Return a handle to a run that was started elsewhere."""
        return FlowHandle(self._client, parse_id("run", run_id))

    anames = async_variant(names)
    apublish = async_variant(publish)


class StartableFlow:
    """One flow, by name; the newest version counts when a run is started, unless one is chosen."""

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
        """Its name."""
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
        """Return this flow with a version, an idempotency key, tags or an initial shared state for the next runs."""
        key = None if key is None else check_label("key", key)
        return StartableFlow(self._client, self.name, version, key, check_tags(tags), shared)

    def definition(self) -> Flow:
        """Return the newest version."""
        return self._client.backend.flows.latest(self.name).flow

    def start(self, /, **params: Any) -> FlowHandle:
        """Start a run; it is durable when this returns. Inside a task, the scheduler starts it."""
        key, tags, version, shared = self._key, self._tags, self._version, self._shared
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
        """Send a value to a run under a key."""
        self._run(run_id).signal(key, value, why=why)

    def approve(self, run_id: str | UUID, *, why: str = "", node: str | None = None) -> None:
        """Approve what a run waits for."""
        self._run(run_id).approve(why=why, node=node)

    def reject(self, run_id: str | UUID, *, why: str = "", node: str | None = None) -> None:
        """Reject what a run waits for."""
        self._run(run_id).reject(why=why, node=node)

    def _run(self, run_id: str | UUID) -> FlowHandle:
        return FlowHandle(self._client, parse_id("run", run_id))

    adefinition = async_variant(definition)
    astart = async_variant(start)
    asignal = async_variant(signal)
    aapprove = async_variant(approve)
    areject = async_variant(reject)
