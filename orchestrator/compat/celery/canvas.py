"""Chains, groups and chords: signatures that are put together before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.compat.celery import composing
from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.compat.celery.signatures import Signature, maybe_signature, signature
from orchestrator.compat.celery.utils import listed


class _Composite(Signature):
    """What is made of several calls."""

    def __init__(self, kind: str, kwargs: Mapping[str, Any], app: Any, options: Mapping[str, Any]) -> None:
        super().__init__(f"celery.{kind}", (), kwargs, options, subtask_type=kind, app=app)

    @property
    def app(self) -> Any:
        found = self._app or next((one._app for one in composing.calls_in(self) if one._app is not None), None)
        return app_or_default(found)

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Start a run of it; its result is that of its last part."""
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **options)
        return composing.start(self, tuple(args or ()), dict(kwargs or {}), options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply_async(args, kwargs)

    def apply(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        return composing.apply(self, tuple(args or ()), dict(kwargs or {}), options)

    def freeze(self, _id: str | None = None, **_: Any) -> Any:
        """Refuse it: the ids of parts follow from that of the run."""
        raise NotCovered(
            f"freeze() of a {self.subtask_type}", "apply_async(task_id=…) gives the whole of it an id of your own."
        )

    def unchain_tasks(self) -> list[Any]:
        """Return copies of its tasks, with its error callbacks."""
        tasks = [one.clone() for one in self.tasks]
        for errback in listed(self.options.get("link_error")):
            for one in tasks:
                one.link_error(errback)
        return tasks

    @property
    def tasks(self) -> list[Any]:
        found: list[Any] = self.kwargs["tasks"]
        return found

    @tasks.setter
    def tasks(self, tasks: Any) -> None:
        self.kwargs["tasks"] = list(tasks)

    def _restore(self) -> None:
        self["kwargs"] = {
            **self["kwargs"],
            "tasks": [maybe_signature(one, self._app) for one in self["kwargs"]["tasks"]],
        }

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return self.tasks[key]
        return super().__getitem__(key)


@Signature.register_type("chain")
class chain(_Composite):  # Celery's name
    """Calls one after another; each is given the result of the one before."""

    def __init__(self, *tasks: Any, app: Any = None, **options: Any) -> None:
        flat = [one for part in _parts(tasks) for one in _unchained(part)]
        super().__init__("chain", {"tasks": flat}, app, options)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.tasks)) or "<empty chain>"


def _unchained(part: Any) -> list[Any]:
    if isinstance(part, chain) and not part.options:
        return part.tasks
    return [part]


@Signature.register_type("group")
class group(_Composite):  # Celery's name
    """Calls side by side; the result is the list of theirs."""

    def __init__(self, *tasks: Any, app: Any = None, **options: Any) -> None:
        super().__init__("group", {"tasks": list(_parts(tasks))}, app, options)

    def link(self, callback: Any) -> Any:
        """Call another after the first of its tasks, as Celery does."""
        return self.tasks[0].link(maybe_signature(callback).set(immutable=True))

    def link_error(self, errback: Any) -> Any:
        """Call another after each of its tasks that fails."""
        return tuple(one.link_error(maybe_signature(errback)) for one in self.tasks)

    def skew(self, start: float = 1.0, stop: float | None = None, step: float = 1.0) -> group:
        countdown = start
        for one in self.tasks:
            one.set(countdown=countdown)
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
    """A group, and a call that is given the list of its results."""

    def __init__(self, header: Any, body: Any = None, app: Any = None, **options: Any) -> None:
        made = header if isinstance(header, group) else group(*_parts((header,)), app=app)
        kwargs = {"header": made, "body": maybe_signature(body)}
        super().__init__(
            "chord", kwargs, app, {key: value for key, value in options.items() if key not in ("args", "kwargs")}
        )

    def __call__(self, body: Any = None, **options: Any) -> Any:
        """Start a run of it, with this body."""
        return self.apply_async((), {"body": body} if body is not None else {}, **options)

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        given = dict(kwargs or {})
        body = given.pop("body", None)
        if body is None:
            return super().apply_async(args, given, **options)
        copied = self.clone()
        copied.kwargs["body"] = maybe_signature(body)
        return copied.apply_async(args, given, **options)

    @property
    def tasks(self) -> list[Any]:
        found: list[Any] = self.kwargs["header"].tasks
        return found

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
        """Call another where its body, or a task of its header, fails."""
        if self.app.conf.task_allow_error_cb_on_chord_header:
            self.kwargs["header"].link_error(errback)
        self.body.link_error(errback)
        return errback

    def _restore(self) -> None:
        header = self["kwargs"]["header"]
        made = (
            group(*(maybe_signature(one, self._app) for one in header), app=self._app)
            if isinstance(header, list)
            else maybe_signature(header, self._app)
        )
        self["kwargs"] = {
            **self["kwargs"],
            "header": made,
            "body": maybe_signature(self["kwargs"].get("body"), self._app),
        }

    def __repr__(self) -> str:
        return f"{self.body!r}({self.tasks!r})"


class _OverItems(Signature):
    """One call that runs a task for each item."""

    kind = ""

    def __init__(self, task: Any, it: Iterable[Any], app: Any = None, **options: Any) -> None:
        called = maybe_signature(task)
        super().__init__(
            f"celery.{self.kind}",
            (),
            {"task": called, "it": list(it)},
            options,
            subtask_type=f"x{self.kind}",
            immutable=True,
            app=app or called._app,
        )

    def __repr__(self) -> str:
        return f"[{self.kwargs['task']['task']}({'*' * (self.kind == 'starmap')}x) for x in {self.kwargs['it']!r}]"


@Signature.register_type("xmap")
class xmap(_OverItems):  # Celery's name
    """One task that calls another for each item."""

    kind = "map"


@Signature.register_type("xstarmap")
class xstarmap(_OverItems):  # Celery's name
    """The same where an item is a tuple of arguments."""

    kind = "starmap"


@Signature.register_type("chunks")
class chunks(_Composite):  # Celery's name
    """Calls for `n` items each."""

    def __init__(self, task: Any, it: Iterable[Any], n: int, app: Any = None, **options: Any) -> None:
        super().__init__("chunks", {"task": maybe_signature(task), "it": list(it), "n": n}, app, options)

    def _restore(self) -> None:
        self["kwargs"] = {**self["kwargs"], "task": maybe_signature(self["kwargs"]["task"], self._app)}

    @property  # type: ignore[misc]  # it is computed
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
    """Yield the parts that were given one by one, or as one iterable."""
    is_one = len(tasks) == 1 and not isinstance(tasks[0], dict) and isinstance(tasks[0], Iterable)
    for one in tasks[0] if is_one else tasks:
        yield from _parts((one,)) if not isinstance(one, dict) and isinstance(one, Iterable) else [maybe_signature(one)]


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
