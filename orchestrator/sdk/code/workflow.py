"""Registered `async def` workflows, and the registry that finds them and tasks by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import CancelChildRun, StartChildRun
from orchestrator.domain.fleet.announced import upgrading
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.errors import (
    InvalidWorkflow,
    NotDeterministic,
    NotFound,
    OrchestratorError,
    UnknownTask,
    did_you_mean,
)
from orchestrator.sdk.checks import check_label, check_name
from orchestrator.sdk.client import Client, Deployment, client_of
from orchestrator.sdk.code.child_run import ChildRun
from orchestrator.sdk.code.commander import current
from orchestrator.sdk.code.guards import watch_package_of
from orchestrator.sdk.code.handle import W_co, WorkflowHandle
from orchestrator.sdk.code.known_handlers import WorkflowSignature
from orchestrator.sdk.code.loop import keep_order
from orchestrator.sdk.code.messages import SignalMethod, UpdateMethod, name_of, signal_value
from orchestrator.sdk.code.options import OPTION_NAMES, CodeOptions, Versioning, with_code_options
from orchestrator.sdk.code.starting import Starting
from orchestrator.sdk.ids import parse_id
from orchestrator.sdk.inside import inside_workflow
from orchestrator.sdk.modules import Modules
from orchestrator.sdk.tasks.option_types import RunOptionTypes, StartOptionTypes
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import digest_call, encode_call, encode_value
from orchestrator.sdk.waiting.async_variants import async_variant, async_variant_of

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
U = TypeVar("U")
RunId = WorkflowHandle[Any] | UUID | str


class CodeWorkflow(Generic[P, R, W_co]):
    """A registered workflow. `W_co` is its class, or None for a function.

    Inside another workflow, `schedule` runs it as a child.
    """

    def __init__(
        self,
        client: Client,
        registry: Registry,
        name: str,
        version: int,
        function: Callable[..., Any],
        options: CodeOptions,
        signature: WorkflowSignature | None = None,
        versioning: Versioning | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._client = client
        self._registry = registry
        self.name = name
        """The name of the workflow: `module.function`, or the `name=` of its decorator."""
        self.version = version
        """The version of the code. A run may be pinned to it."""
        self.versioning = versioning
        """How a new version affects open runs. None: they stay on their version while a worker has it."""
        self.function = function
        """The `async def` function itself."""
        self._code_options = options
        self._signature = signature or WorkflowSignature(
            name, function, OPTION_NAMES, lambda: registry.workflows._functions(name)
        )

    def __call__(self, *_: P.args, **__: P.kwargs) -> R:
        """Raise NotDeterministic: a workflow cannot be called like a function."""
        raise NotDeterministic(
            f"Workflow {self.name!r} was called like a function, which would run it without a history. "
            f"Inside a workflow, use {self.name}.schedule(…)."
        )

    def __repr__(self) -> str:
        return f"<CodeWorkflow {self.name} version {self.version}{self._client.via}>"

    def options(self, **options: Unpack[RunOptionTypes]) -> CodeWorkflow[P, R, W_co]:
        """Return a copy of this workflow with other options."""
        return self._variant(self._client, with_code_options(self._code_options, options))

    def via(self, cell: Deployment) -> CodeWorkflow[P, R, W_co]:
        """Return this workflow for another deployment: `order.via(europe).start(…)`; see `app.at`."""
        return self._variant(client_of(cell), self._code_options)

    def _variant(self, client: Client, options: CodeOptions) -> CodeWorkflow[P, R, W_co]:
        same = (self.name, self.version, self.function, options, self._signature)
        return CodeWorkflow(client, self._registry, *same, versioning=self.versioning)

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R, W_co]:
        """Start a run. The run is durable when this returns."""
        return self.starting().start(*args, **kwargs)

    astart = async_variant(start)

    # A tuple has no ParamSpec: only the number of an update's arguments and the types of the first three are checked.
    @overload
    def starting(
        self,
        *,
        signal: tuple[str, Any]
        | tuple[SignalMethod[W_co, [], Any], None]
        | tuple[SignalMethod[W_co, [A], Any], A]
        | None = None,
        update: None = None,
        **options: Unpack[StartOptionTypes],
    ) -> Starting[P, R, W_co]: ...
    @overload
    def starting(
        self, *, update: tuple[str, *tuple[Any, ...]], **options: Unpack[StartOptionTypes]
    ) -> Starting[P, R, W_co]: ...
    @overload
    def starting(
        self, *, update: tuple[UpdateMethod[W_co, [], Any, U]], **options: Unpack[StartOptionTypes]
    ) -> Starting[P, R, W_co, U]: ...
    @overload
    def starting(
        self, *, update: tuple[UpdateMethod[W_co, Concatenate[A, ...], Any, U], A], **options: Unpack[StartOptionTypes]
    ) -> Starting[P, R, W_co, U]: ...
    @overload
    def starting(
        self,
        *,
        update: tuple[UpdateMethod[W_co, Concatenate[A, B, ...], Any, U], A, B],
        **options: Unpack[StartOptionTypes],
    ) -> Starting[P, R, W_co, U]: ...
    @overload
    def starting(
        self,
        *,
        update: tuple[UpdateMethod[W_co, Concatenate[A, B, C, ...], Any, U], A, B, C, *tuple[Any, ...]],
        **options: Unpack[StartOptionTypes],
    ) -> Starting[P, R, W_co, U]: ...

    def starting(
        self,
        *,
        id: str | None = None,
        on_conflict: OnConflict | None = None,
        tags: Sequence[str] = (),
        attributes: Mapping[str, str | int | float | bool | datetime] = {},
        signal: tuple[Any, ...] | None = None,
        update: tuple[Any, ...] | None = None,
        update_id: str | None = None,
        pinned: bool | None = None,
    ) -> Starting[P, R, W_co, Any]:
        """Set options for starting runs: `order.starting(id="o-1", on_conflict="return").start(…)`.

        `id` is an id of your own. At most one open run of this workflow has it. If another run has it, `on_conflict`
        decides: `reject` (the default) refuses the start, `return` gives that run, and `anew` starts a new run if that
        one has ended. With a `signal` (name and value), the open run with this id receives the signal; if there is
        none, a new run starts with it. An `update` (name or method, and arguments) works the same way:
        `starting(…).execute(…)` returns its answer, and so does `handle.update_handle(update_id)`.

        A `pinned` run always uses this version of the workflow and waits for workers that have it. If `pinned` is not
        given, the workflow's `versioning` decides. Lists can be filtered by `tags` and `attributes`.
        """
        return Starting(
            self._client,
            self._signature,
            self._begin,
            timeout=self._code_options.seconds or None,
            id=id,
            on_conflict=on_conflict,
            tags=tags,
            attributes=attributes,
            signal=signal,
            update=update,
            update_id=update_id,
            pinned=self.versioning == "pinned" if pinned is None else pinned,
        )

    def find(self, id: str) -> WorkflowHandle[R, W_co]:
        """Return the newest run that was started under an id of your own. Raise NotFound if there is none.

        Inside a workflow, the scheduler looks the run up when it is signalled, queried, cancelled or awaited.
        """
        check_label("run id", id)
        if inside_workflow():
            key = scoped(self.name, id)
            return WorkflowHandle(self._client, bytes(16), self._signature, key=key)
        run_id = self._client.backend.code.find(self.name, id)
        if run_id is None:
            raise NotFound(
                f"No run of workflow {self.name!r} was started under the id {id!r}, or it has been pruned. "
                f"A run that was started without an id of your own is found by its own: app.workflow_run(id)."
            )
        return WorkflowHandle(self._client, run_id, self._signature)

    afind = async_variant(find)

    @overload
    def signal_many(self, name: str, signals: Iterable[tuple[RunId, Any]]) -> Missed: ...
    @overload
    def signal_many(self, name: SignalMethod[W_co, [A], Any], signals: Iterable[tuple[RunId, A]]) -> Missed: ...
    @overload
    def signal_many(self, name: SignalMethod[W_co, [], Any], signals: Iterable[tuple[RunId, None]]) -> Missed: ...

    def signal_many(self, name: str | SignalMethod[Any, ..., Any], signals: Iterable[tuple[RunId, Any]]) -> Missed:
        """Send signals, pairs of a run and a value, to runs of this workflow in one statement. A run may get several.

        Return the ids of runs that got nothing: they have ended or, if they are in the result's `unknown`, are no runs
        of this workflow. A signal to a run that ends at the same moment is lost, as with `handle.signal`.
        """
        limit, signal_name = self._client.settings.largest_value, name_of(SignalMethod, name, self._signature)
        encoded = []
        for run, value in signals:
            run_id = run._run if isinstance(run, WorkflowHandle) else parse_id("run", run)
            _, value = signal_value(name, [value], {}, limit)
            encoded.append((run_id, encode_value(value, f"Signal {signal_name!r}", limit)))
        code = self._client.backend.code
        missed = code.signal_many(self.name, signal_name, encoded)
        return Missed(missed, code.known(self.name, missed) if missed else ())

    @overload
    async def asignal_many(self, name: str, signals: Iterable[tuple[RunId, Any]]) -> Missed: ...
    @overload
    async def asignal_many(self, name: SignalMethod[W_co, [A], Any], signals: Iterable[tuple[RunId, A]]) -> Missed: ...
    @overload
    async def asignal_many(
        self, name: SignalMethod[W_co, [], Any], signals: Iterable[tuple[RunId, None]]
    ) -> Missed: ...
    @async_variant_of(signal_many)
    async def asignal_many(self, *_: Any, **__: Any) -> Any: ...

    def schedule(self, /, *args: P.args, **kwargs: P.kwargs) -> ChildRun[R, W_co]:
        """Inside a workflow: start a child run. Its future and its handle are available immediately."""
        commander = current()
        if commander is None or commander.started is None:
            raise OrchestratorError(f"{self.name}.schedule(…) works inside a workflow only.")
        self._client.refuse_cell(f"Workflow {self.name!r}")
        payload = self._encode_call(args, kwargs)
        options = self._code_options
        ordinal, identifier = commander.next("child")
        commander.issue(
            StartChildRun(
                ordinal,
                identifier,
                self.name,
                payload,
                name=options.name or self.name,
                version=self.version,
                queue=options.queue or commander.started.queue,
                timeout=options.seconds or None,
                detached=options.detached or options.close_policy == "abandon",
                digest=digest_call(args, kwargs),
                terminates=options.close_policy == "terminate",
                pinned=self.versioning == "pinned",
            )
        )
        cancel = None if options.on_cancel == "abandon" else CancelChildRun(identifier)
        restore = self._signature.restore_result
        child: ChildRun[R, W_co] = ChildRun(commander, identifier, f"Workflow {self.name!r}", restore, cancel)
        child.waits_for_end = options.on_cancel == "wait"
        child.handle = WorkflowHandle(self._client, identifier, self._signature)
        return child

    @property
    def _upgrades(self) -> bool:
        """Whether open runs of older versions move to this version as soon as a worker has it."""
        return self.versioning == "auto_upgrade"

    @property
    def _queue(self) -> str:
        return self._code_options.queue or self._client.route(self.name)

    def _begin(self, /, *args: P.args, **kwargs: P.kwargs) -> history.RunStarted:
        """Check the arguments of a call, and return the first event of a run with them."""
        return history.RunStarted(self.name, self.version, self._encode_call(args, kwargs), self._queue)

    def _encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        self._signature.check(args, kwargs)
        payload = encode_call(self.name, args, kwargs, self._client.settings.largest_value, "workflow")
        self._signature.check_types(args, kwargs, payload)
        return payload


class Missed(list[str]):
    """The ids of runs that received none of the signals of `signal_many`."""

    def __init__(self, runs: Iterable[bytes], known: Iterable[bytes]) -> None:
        super().__init__(map(to_text, runs))
        ended = {to_text(run) for run in known}
        self.unknown: list[str] = [run for run in self if run not in ended]
        """Runs of another workflow, or deleted ones. All other runs in the list have ended."""


class CodeWorkflows(Mapping[str, "CodeWorkflow[..., Any]"]):
    """`app.code_workflows`: maps each name to the newest version of the registered workflow."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._versions: dict[str, dict[int, CodeWorkflow[..., Any]]] = {}

    def __getitem__(self, name: str) -> CodeWorkflow[..., Any]:
        versions = self._versions[name]
        return versions[max(versions)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def _announced(self) -> set[str]:
        """The names that a worker announces: each workflow, each of its versions for pinned runs, and upgrades."""
        versions = {f"{name}@{version}" for name, versions in self._versions.items() for version in versions}
        return {*self} | versions | {upgrading(code.name, code.version) for code in self.values() if code._upgrades}

    def _functions(self, name: str) -> list[Callable[..., Any]]:
        return [version.function for version in self._versions.get(name, {}).values()]

    def find(self, name: str, version: int | None = None) -> CodeWorkflow[..., Any]:
        """Return a workflow by name, in this version if it is registered, else in the newest.

        A run of an older version continues with newer code if that code fits its history. If not, the run is stuck.
        """
        if name not in self._versions:
            self._modules.load()
        versions = self._versions.get(name)
        if versions is None:
            known = ", ".join(sorted(self)) or "none"
            raise NotFound(f"No workflow is registered as {name!r}.{did_you_mean(name, self)} Known: {known}.")
        return versions.get(version or 0) or self[name]

    def _add(self, workflow: CodeWorkflow[..., Any]) -> None:
        versions = self._versions.setdefault(workflow.name, {})
        other = versions.get(workflow.version)
        if other is not None and _code(other) is not _code(workflow):
            raise InvalidWorkflow(
                f"Version {workflow.version} of workflow {workflow.name!r} is registered twice. Pass a "
                "different name= or version= to one of the functions."
            )
        versions[workflow.version] = workflow
        watch_package_of(workflow.function.__module__)
        keep_order()


def _code(workflow: CodeWorkflow[..., Any]) -> object:
    return inspect.unwrap(workflow.function).__code__


@dataclass(frozen=True)
class Registry:
    """The tasks and code workflows of an application, and the modules that may register more."""

    tasks: dict[str, Task[..., Any]]
    workflows: CodeWorkflows
    modules: Modules

    def find_task(self, name: str) -> Task[..., Any]:
        if check_name("task", name) not in self.tasks:
            self.modules.load()
        try:
            return self.tasks[name]
        except KeyError:
            known = ", ".join(sorted(self.tasks)) or "none"
            raise UnknownTask(f"No task is called {name!r}.{did_you_mean(name, self.tasks)} Known: {known}.") from None

    def find(self, name: str) -> Task[..., Any] | CodeWorkflow[..., Any]:
        """Return the task with this name, or else the workflow."""
        found = self._registered(name)
        if found is None:
            self.modules.load()
            found = self._registered(name)
        if found is None:
            known = sorted({*self.tasks, *self.workflows})
            raise UnknownTask(
                f"No task and no workflow is called {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        return found

    def _registered(self, name: str) -> Task[..., Any] | CodeWorkflow[..., Any] | None:
        return self.tasks.get(name) or self.workflows.get(name)
