"""Build definitions of compositions and start runs of them.

A composition becomes one DAG of flat steps (`domain/dag/placement.py`):

    a | b                       two steps; the input of the second is the output of the first
    group(a.s(1), a.s(2), …)    one fan-out over all arguments
    group(a.s(1), b.s(2))       a step for each
    group(a.s(1) | b.s(), …)    one fan-out over child runs, with a definition built from the first part
    chord(group, c)             the group, and a step whose input is the list of its outputs
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Raw

from orchestrator.domain import redaction
from orchestrator.domain.dag import composed
from orchestrator.domain.dag.checks import MAX_STEPS, RESERVED
from orchestrator.domain.dag.composed import ARGS, POSITIONAL, PREVIOUS, RESULT
from orchestrator.domain.dag.definition import Definition, Param, Registered, Step
from orchestrator.domain.dag.operators import KEYWORDS
from orchestrator.domain.limits.lane_limits import key_text
from orchestrator.domain.tasks.starts import StartSteps
from orchestrator.errors import InvalidTask, InvalidWorkflow
from orchestrator.sdk.catalogue import start_run
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.client import Client
from orchestrator.sdk.dag.registered import inheriting_redaction, options_of_part
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.middleware import EnqueueCall
from orchestrator.sdk.tasks.by_name import start_many
from orchestrator.sdk.tasks.composition_handle import CompositionHandle
from orchestrator.sdk.tasks.compositions import Call, Chain, Composition, Group, Map
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import encode_call
from orchestrator.sdk.values.sealing import store_of

Part = Composition[Any]
_MAX_NAME = 100
_call_of = msgspec.msgpack.Decoder(tuple[list[Raw], dict[str, Raw]]).decode
_registered: WeakKeyDictionary[Task[..., Any], Registered] = WeakKeyDictionary()


class Composer:
    """Starts compositions for a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __call__(
        self, part: Part, name: str | None, key: str | None, tags: Sequence[str], on_success: bool
    ) -> CompositionHandle[Any]:
        """Start a run: of many tasks if the composition only maps one task, else of its definition."""
        if isinstance(part, Map) and key is None and not tags:
            task = _task(part).options(on_success=True) if on_success else _task(part)
            run_id = start_many(task, part.calls(), name)
            return CompositionHandle(self._client, run_id, lambda: None, signature=_task(part)._signature)
        first = next(part._calls())
        if other := next((call for call in part._calls() if call.task._client is not self._client), None):
            raise InvalidWorkflow(
                f"A composition runs in one deployment, and {other.task!r} belongs to a different one from "
                f"{first.task!r}. Send all via the same cell, and register all with the same Orchestrator."
            )
        _task(first)._refuse_in_workflow("started in a composition")
        submit = _task(first).options(on_success=on_success)._enqueue_path()
        key, tags = None if key is None else check_label("key", key), check_tags(tags)
        run_name = check_name("run", name or _label(part))
        shape = _Shape(self._client, run_name if name is None else _label(part))
        definition = shape.definition(shape.add(part, None), is_fed=False)
        runtime = self._client.runtime()
        run_id = new_id() if runtime is None else runtime.next_id()
        args = composed.packed(
            msgspec.msgpack.encode(_Arguments(self._client, run_id, is_compared=key is not None).of(part, is_fed=False))
        )
        definitions = [*shape.children.values(), definition]

        def create(run_id: bytes) -> bytes:
            workflows = self._client.backend.workflows
            return workflows.compose(definitions, args, run_id, name=run_name, key=key, tags=tags)

        start = StartSteps(
            definition.name, key=key, tags=tags, name=run_name, definitions=tuple(map(_encoded, definitions))
        )
        run_id = start_run(self._client, start, {ARGS: args}, create, run_id, submit, lambda: _seen(part))
        return CompositionHandle(self._client, run_id, lambda: definition, part._restored, first.task._signature)


def _seen(part: Part) -> list[EnqueueCall]:
    calls = part._calls()
    return [EnqueueCall(kind="task", name=call.task.name, args=call.args, kwargs=call.kwargs) for call in calls]


def _encoded(definition: Definition) -> str:
    return msgspec.json.encode(definition).decode()


def _task(part: Call[Any] | Map[Any]) -> Task[..., Any]:
    assert isinstance(part.task, Task)
    return part.task


def _label(part: Part) -> str:
    """Return the default name of a run: `chain:fetch/parse/store`."""
    kind = type(part).__name__.lower()
    names = dict.fromkeys(call.task.name.rpartition(".")[2] for call in part._calls())
    text = f"{kind}:{'/'.join(names)}"
    return re.sub(r"[^\w.:/-]", "-", text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 3] + "...")


class _Value(NamedTuple):
    template: Any
    """The template that passes the result to another step's input."""
    steps: tuple[str, ...]
    """The steps that produce the result. Following steps wait for them."""
    lost: str | None = None
    """The name of a task in the part that keeps no result, if any."""


class _Shape:
    def __init__(self, client: Client, label: str) -> None:
        self._client = client
        self._label = label
        self._steps: dict[str, Step] = {}
        self._names: Counter[str] = Counter()
        self._arguments_count = 0
        self.children: dict[str, Definition] = {}
        """Definitions of nested compositions that become child runs."""

    def definition(self, value: _Value, *, is_fed: bool) -> Definition:
        if not self._steps:
            raise InvalidWorkflow("An empty composition cannot be started: give it a task, such as fetch.s(url).")
        if len(self._steps) > MAX_STEPS:
            raise InvalidWorkflow(
                f"The composition has {len(self._steps):,} steps, and at most {MAX_STEPS:,} are allowed. Calls of one "
                f"task with the same number of arguments are one step: resize.map(paths)."
            )
        params = {ARGS: Param(type="string"), RESULT: Param(default=value.template)}
        if is_fed:
            params[PREVIOUS] = Param(type="string")
        redacted_everywhere = redaction.split_patterns(self._client.settings.redact)
        steps = tuple(inheriting_redaction([*self._steps.values()], redacted_everywhere))
        return composed.named(Definition(name="", description=self._label, params=params, steps=steps))

    def add(self, part: Part, before: _Value | None) -> _Value:
        """Add the steps of a part. Its input is the result of `before`, if given."""
        if isinstance(part, Call):
            return self._add_call(part, before, is_fan_out=False)
        if isinstance(part, Chain):
            for inner in part.parts:
                before = self.add(inner, before)
            assert before is not None
            return before
        assert isinstance(part, Group)
        first = part._first
        if first is None or not part._is_uniform:
            values = [self.add(inner, before) for inner in part.parts]
            steps = dict.fromkeys(step for value in values for step in value.steps)
            lost = next((value.lost for value in values if value.lost), None)
            return _Value([value.template for value in values], tuple(steps) or (before.steps if before else ()), lost)
        return (
            self._add_call(first, before, is_fan_out=True) if isinstance(first, Call) else self._add_runs(first, before)
        )

    def _add_call(self, call: Call[Any], before: _Value | None, *, is_fan_out: bool) -> _Value:
        task = _task(call)
        items = self._next_arguments()
        number = len(call.args) + len(call.kwargs) + _has_key(task)
        arguments_path = "item" if is_fan_out else items
        templates = [f"${{{arguments_path}[{index}]}}" for index in range(number)]
        if is_fan_out and number == 1:
            templates = ["${item}"]
        positional = []
        if before is not None and not call.immutable:
            if before.lost is not None:
                raise InvalidTask(
                    f"Task {before.lost!r} keeps no result (store_result=False), so {task.name!r}, which follows it, "
                    f"would be given None. Keep the result, or write .si(…)."
                )
            positional = [before.template]
        positional += templates[: len(call.args)]
        depends_on = before.steps if before is not None else ()
        registered = _registered.get(task)
        if registered is None:
            registered = _registered[task] = options_of_part(task)
        return self._add_step(
            task.name.rpartition(".")[2],
            task=task.name,
            depends_on=depends_on,
            input=dict(zip(sorted(call.kwargs), templates[len(call.args) :], strict=False))
            | ({POSITIONAL: positional} if positional else {}),
            foreach=items if is_fan_out else None,
            concurrency_key=templates[-1] if _has_key(task) else None,
            registered=msgspec.structs.replace(registered, ignored=(*depends_on, "item")),
        )._replace(lost=None if task._call_options.store_result else task.name)

    def _add_runs(self, first: Part, before: _Value | None) -> _Value:
        """Add a fan-out over child runs of compositions with the same structure as the first one."""
        label = _label(first)
        shape = _Shape(self._client, label)
        is_fed = before is not None
        value = shape.add(first, _Value(f"${{params.{PREVIOUS}}}", ()) if is_fed else None)
        definition = shape.definition(value, is_fed=is_fed)
        self.children |= {**shape.children, definition.name: definition}
        return self._add_step(
            label.partition(":")[2].replace("/", "-"),
            workflow=definition.name,
            depends_on=before.steps if before is not None else (),
            input={ARGS: "${item}"} | ({PREVIOUS: before.template} if before is not None else {}),
            foreach=self._next_arguments(),
        )._replace(lost=value.lost)

    def _next_arguments(self) -> str:
        """Return the path of the next part's arguments in the parameters, as `_Arguments` orders them."""
        self._arguments_count += 1
        return f"params.{ARGS}[{self._arguments_count - 1}]"

    def _add_step(self, title: str, **fields: Any) -> _Value:
        base = re.sub(r"[^A-Za-z0-9_-]|^(?![A-Za-z_])", "_", title)[:_MAX_NAME]
        name = base
        while name in self._steps or name in RESERVED or name in KEYWORDS:
            self._names[base] += 1
            name = f"{base}-{self._names[base] + 1}"
        self._steps[name] = Step(name=name, **fields)
        return _Value(f"${{`{name}`}}", (name,))


def _has_key(task: Task[..., Any]) -> bool:
    """Return whether a task computes its concurrency key from the arguments. The key is then passed after them."""
    return callable(task._redacting_options.concurrency_key)


class _Arguments:
    """Checks and encodes the arguments of a composition, in the order of the parts of its definition."""

    def __init__(self, client: Client, run_id: bytes, *, is_compared: bool) -> None:
        self._settings = client.settings
        self._store = store_of(client.settings)
        self._run_id = run_id
        self._is_compared = is_compared
        """Whether the arguments are compared with those of another start with the same key."""

    def of(self, part: Part, *, is_fed: bool) -> list[Any]:
        """Return the arguments of the calls in a part. A fan-out has one list for all items."""
        if isinstance(part, Call):
            return [self._of_call(part, is_fed=is_fed)]
        if isinstance(part, Chain):
            parts = enumerate(part.parts)
            return [arguments for number, inner in parts for arguments in self.of(inner, is_fed=is_fed or number > 0)]
        assert isinstance(part, Group)
        if part._first is None or not part._is_uniform:
            return [arguments for inner in part.parts for arguments in self.of(inner, is_fed=is_fed)]
        if not isinstance(part._first, Call):
            return [[self.of(inner, is_fed=is_fed) for inner in part.parts]]
        rows = [self._of_call(call, is_fed=is_fed) for call in part.parts if isinstance(call, Call)]
        if not rows or len(rows[0]) != 1:
            return [rows]
        items = msgspec.msgpack.encode([row[0] for row in rows])
        if self._store is not None:  # stored like a result, whose items are read one by one
            items = self._store.result(items, self._run_id, None, 0)
        return [Raw(items)]

    def _of_call(self, call: Call[Any], *, is_fed: bool) -> list[Any]:
        task, args, kwargs = _task(call), call.args, call.kwargs
        payload = encode_call(task.name, args, kwargs, self._settings.largest_value, is_compared=self._is_compared)
        if is_fed and not call.immutable:
            task._signature.check_partial(args, kwargs, payload)
        else:
            task._signature.check(args, kwargs)
            task._signature.check_types(args, kwargs, payload)
        positional, keywords = _call_of(payload)
        values = [*positional, *(keywords[name] for name in sorted(keywords))]
        if self._store is not None and len(payload) > self._store.inline:
            values = [Raw(self._store.arguments(bytes(value), self._run_id, None)) for value in values]
        if _has_key(task):
            values.append(Raw(msgspec.msgpack.encode(self._key_of(task, args, kwargs, is_fed and not call.immutable))))
        return values

    @staticmethod
    def _key_of(task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], lacks_first: bool) -> str | None:
        if lacks_first:
            raise InvalidTask(
                f"Task {task.name!r}: option concurrency_key is a function of the arguments, and the first of them is "
                f"known only when the part before has ended. Give it a fixed one: .options(concurrency_key=…).s(…)."
            )
        return key_text(task._redacting_options.fixed(task._signature.named(args, kwargs)).concurrency_key)
