"""Chains, groups and chords: signatures composed of signatures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.compat.celery import composing
from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.compat.celery.signatures import Signature, maybe_signature, signature
from orchestrator.compat.celery.utils import listed


class _Composite(Signature):
    """A signature that consists of several calls."""

    def __init__(self, kind: str, kwargs: Mapping[str, Any], app: Any, options: Mapping[str, Any]) -> None:
        super().__init__(f"celery.{kind}", (), kwargs, options, subtask_type=kind, app=app)

    @property
    def app(self) -> Any:
        app = self._app or next((call._app for call in composing.calls_in(self) if call._app is not None), None)
        return app_or_default(app)

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Start a run of the composition; return the result of its last part."""
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **options)
        return composing.start(self, tuple(args or ()), dict(kwargs or {}), options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply_async(args, kwargs)

    def apply(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        return composing.apply(self, tuple(args or ()), dict(kwargs or {}), options)

    def freeze(self, _id: str | None = None, **_: Any) -> Any:
        """Refuse: the ids of the parts follow from the run's id."""
        raise NotCovered(
            f"freeze() of a {self.subtask_type}", "apply_async(task_id=…) sets the id of the whole composition."
        )

    def unchain_tasks(self) -> list[Any]:
        """Return copies of the tasks, with the composition's error callbacks."""
        tasks = [task.clone() for task in self.tasks]
        for errback in listed(self.options.get("link_error")):
            for task in tasks:
                task.link_error(errback)
        return tasks

    @property
    def tasks(self) -> list[Any]:
        tasks: list[Any] = self.kwargs["tasks"]
        return tasks

    @tasks.setter
    def tasks(self, tasks: Any) -> None:
        self.kwargs["tasks"] = list(tasks)

    def _restore(self) -> None:
        self["kwargs"] = {
            **self["kwargs"],
            "tasks": [maybe_signature(task, self._app) for task in self["kwargs"]["tasks"]],
        }

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return self.tasks[key]
        return super().__getitem__(key)


@Signature.register_type("chain")
class chain(_Composite):  # Celery's name
    """Calls in sequence; each one gets the result of the one before."""

    def __init__(self, *tasks: Any, app: Any = None, **options: Any) -> None:
        flat = [call for part in _parts(tasks) for call in _unchained(part)]
        super().__init__("chain", {"tasks": flat}, app, options)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.tasks)) or "<empty chain>"


def _unchained(part: Any) -> list[Any]:
    if isinstance(part, chain) and not part.options:
        return part.tasks
    return [part]


@Signature.register_type("group")
class group(_Composite):  # Celery's name
    """Calls in parallel; the result is the list of their results."""

    def __init__(self, *tasks: Any, app: Any = None, **options: Any) -> None:
        super().__init__("group", {"tasks": list(_parts(tasks))}, app, options)

    def link(self, callback: Any) -> Any:
        """Enqueue another task after the first task of the group, as Celery does."""
        return self.tasks[0].link(maybe_signature(callback).set(immutable=True))

    def link_error(self, errback: Any) -> Any:
        """Enqueue another task after each task of the group that fails."""
        return tuple(task.link_error(maybe_signature(errback)) for task in self.tasks)

    def skew(self, start: float = 1.0, stop: float | None = None, step: float = 1.0) -> group:
        countdown = start
        for task in self.tasks:
            task.set(countdown=countdown)
            countdown += step
            if stop is not None and countdown > stop:
                countdown = start
        return self

    def __len__(self) -> int:
        return len(self.tasks)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"group({self.tasks!r})"


@Signature.register_type("chord")
class chord(_Composite):  # Celery's name
    """A group, and a body that gets the list of the group's results."""

    def __init__(self, header: Any, body: Any = None, app: Any = None, **options: Any) -> None:
        group_ = header if isinstance(header, group) else group(*_parts((header,)), app=app)
        kwargs = {"header": group_, "body": maybe_signature(body)}
        super().__init__(
            "chord", kwargs, app, {key: value for key, value in options.items() if key not in ("args", "kwargs")}
        )

    def __call__(self, body: Any = None, **options: Any) -> Any:
        """Start a run with this body."""
        return self.apply_async((), {"body": body} if body is not None else {}, **options)

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        keywords = dict(kwargs or {})
        body = keywords.pop("body", None)
        if body is None:
            return super().apply_async(args, keywords, **options)
        copy = self.clone()
        copy.kwargs["body"] = maybe_signature(body)
        return copy.apply_async(args, keywords, **options)

    @property
    def tasks(self) -> list[Any]:
        tasks: list[Any] = self.kwargs["header"].tasks
        return tasks

    @tasks.setter
    def tasks(self, tasks: Any) -> None:
        self.kwargs["header"].tasks = tasks

    @property
    def body(self) -> Any:
        return self.kwargs["body"]

    @body.setter
    def body(self, body: Any) -> None:
        self.kwargs["body"] = maybe_signature(body)

    def link(self, callback: Any) -> Any:
        self.body.link(callback)
        return callback

    def link_error(self, errback: Any) -> Any:
        """Enqueue another task if the body fails; a setting adds the tasks of the header."""
        if self.app.conf.task_allow_error_cb_on_chord_header:
            self.kwargs["header"].link_error(errback)
        self.body.link_error(errback)
        return errback

    def _restore(self) -> None:
        header = self["kwargs"]["header"]
        header_ = (
            group(*(maybe_signature(task, self._app) for task in header), app=self._app)
            if isinstance(header, list)
            else maybe_signature(header, self._app)
        )
        self["kwargs"] = {
            **self["kwargs"],
            "header": header_,
            "body": maybe_signature(self["kwargs"].get("body"), self._app),
        }

    def __repr__(self) -> str:
        return f"{self.body!r}({self.tasks!r})"


class _OverItems(Signature):
    """One call that runs a task for each item."""

    kind = ""

    def __init__(self, task: Any, it: Iterable[Any], app: Any = None, **options: Any) -> None:
        task_ = maybe_signature(task)
        super().__init__(
            f"celery.{self.kind}",
            (),
            {"task": task_, "it": list(it)},
            options,
            subtask_type=f"x{self.kind}",
            immutable=True,
            app=app or task_._app,
        )

    def __repr__(self) -> str:
        return f"[{self.kwargs['task']['task']}({'*' * (self.kind == 'starmap')}x) for x in {self.kwargs['it']!r}]"


@Signature.register_type("xmap")
class xmap(_OverItems):  # Celery's name
    """Runs a task for each item, in one call."""

    kind = "map"


@Signature.register_type("xstarmap")
class xstarmap(_OverItems):  # Celery's name
    """Runs a task for each tuple of arguments, in one call."""

    kind = "starmap"


@Signature.register_type("chunks")
class chunks(_Composite):  # Celery's name
    """A group of calls with `n` items each."""

    def __init__(self, task: Any, it: Iterable[Any], n: int, app: Any = None, **options: Any) -> None:
        super().__init__("chunks", {"task": maybe_signature(task), "it": list(it), "n": n}, app, options)

    def _restore(self) -> None:
        self["kwargs"] = {**self["kwargs"], "task": maybe_signature(self["kwargs"]["task"], self._app)}

    @property  # type: ignore[misc]  # computed
    def tasks(self) -> list[Any]:
        it, n = self.kwargs["it"], self.kwargs["n"]
        return [xstarmap(self.kwargs["task"], it[at : at + n], app=self._app) for at in range(0, len(it), n)]

    def group(self) -> group:
        return group(*self.tasks, app=self._app, **self.options)

    @classmethod
    def apply_chunks(cls, task: Any, it: Any, n: int, app: Any = None) -> Any:
        return cls(task, it, n, app=app)()

    def __repr__(self) -> str:
        return f"{self.kwargs['task']!r} in chunks of {self.kwargs['n']}"


def _parts(tasks: Sequence[Any]) -> Iterator[Any]:
    """Yield the signatures from separate arguments or from one iterable."""
    is_iterable = len(tasks) == 1 and not isinstance(tasks[0], dict) and isinstance(tasks[0], Iterable)
    for sig in tasks[0] if is_iterable else tasks:
        yield from _parts((sig,)) if not isinstance(sig, dict) and isinstance(sig, Iterable) else [maybe_signature(sig)]


subtask, maybe_subtask = signature, maybe_signature
_chain, _chord = chain, chord

__all__ = [
    "Signature",
    "chain",
    "chord",
    "chunks",
    "group",
    "maybe_signature",
    "maybe_subtask",
    "signature",
    "subtask",
    "xmap",
    "xstarmap",
]
