"""Signatures: calls of tasks as data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import Refused
from orchestrator.compat.celery.utils import listed, uuid


class Signature(dict[str, Any]):
    """A task's name, arguments and options. A signature is a dictionary, and so encodes as JSON."""

    TYPES: ClassVar[dict[str, type[Signature]]] = {}
    _app: Any = None

    def __init__(
        self,
        task: Any = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        subtask_type: str | None = None,
        immutable: bool = False,
        app: Any = None,
        **ex: Any,
    ) -> None:
        self._app = app
        if isinstance(task, dict):
            super().__init__(task)
            return
        if task is not None and not isinstance(task, str):
            self._app = app or task.app
            task = task.name
        super().__init__(
            task=task,
            args=tuple(args or ()),
            kwargs=dict(kwargs or {}),
            options={**(options or {}), **ex},
            subtask_type=subtask_type,
            immutable=immutable,
        )

    # -- what it holds

    task = property(lambda self: self["task"])
    name = task
    args = property(lambda self: self["args"], lambda self, value: self.__setitem__("args", value))
    kwargs = property(lambda self: self["kwargs"], lambda self, value: self.__setitem__("kwargs", value))
    options = property(lambda self: self["options"], lambda self, value: self.__setitem__("options", value))
    subtask_type = property(lambda self: self.get("subtask_type"))
    immutable = property(lambda self: self["immutable"], lambda self, value: self.__setitem__("immutable", value))
    id = property(lambda self: self.options.get("task_id"))
    parent_id = property(lambda self: self.options.get("parent_id"))
    root_id = property(lambda self: self.options.get("root_id"))

    @property
    def app(self) -> Any:
        return app_or_default(self._app)

    @property
    def type(self) -> Any:
        return self.app.tasks[self["task"]]

    @classmethod
    def register_type(cls, name: str | None = None) -> Any:
        """Return a decorator that registers a subclass for the `subtask_type` of stored signatures."""

        def register(subclass: type[Signature]) -> type[Signature]:
            cls.TYPES[name or subclass.__name__] = subclass
            return subclass

        return register

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], app: Any = None) -> Signature:
        kind = cls.TYPES.get(d.get("subtask_type") or "", Signature)
        new = kind.__new__(kind)
        dict.__init__(new, {"args": (), "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False, **d})
        new._app = app
        new._restore()
        return new

    def _restore(self) -> None:
        """Convert nested dictionaries to signatures."""

    def _merge(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        merged = {**self.options, **{key: value for key, value in (options or {}).items() if value is not None}}
        if self.immutable:
            return tuple(self.args), dict(self.kwargs), merged
        return (*(args or ()), *self.args), {**self.kwargs, **(kwargs or {})}, merged

    # -- calling

    def __call__(self, *partial_args: Any, **partial_kwargs: Any) -> Any:
        args, kwargs, _ = self._merge(partial_args, partial_kwargs)
        return self.type(*args, **kwargs)

    def delay(self, *partial_args: Any, **partial_kwargs: Any) -> Any:
        return self.apply_async(partial_args, partial_kwargs)

    def apply(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Run the task in this process; return its EagerResult."""
        args, kwargs, options = self._merge(args, kwargs, options)
        return self.type.apply(args, kwargs, **options)

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Enqueue the task, with further arguments and options."""
        args, kwargs, options = self._merge(args, kwargs, options)
        task = self.app.tasks.get(self["task"])
        if task is not None:
            return task.apply_async(args, kwargs, **options)
        return self.app.send_task(self["task"], args, kwargs, **options)

    def __invert__(self) -> Any:
        return self.apply_async().get()

    # -- changing

    def clone(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **opts: Any) -> Any:
        """Return a copy with further arguments and options."""
        copy = deepcopy(self)
        if args or kwargs or opts:
            copy["args"], copy["kwargs"], copy["options"] = copy._merge(args, kwargs, opts)
        return copy

    partial = clone

    def replace(self, args: Any = None, kwargs: Any = None, options: Any = None) -> Any:
        copy = deepcopy(self)
        for name, value in (("args", args), ("kwargs", kwargs), ("options", options)):
            if value is not None:
                copy[name] = value
        return copy

    def set(self, immutable: bool | None = None, **options: Any) -> Any:
        if immutable is not None:
            self.set_immutable(immutable)
        self.options.update(options)
        return self

    def set_immutable(self, immutable: bool) -> None:
        """Set whether the task ignores the result of the task before it."""
        self["immutable"] = immutable

    def freeze(self, _id: str | None = None, **_: Any) -> Any:
        """Choose the id of the call; return the AsyncResult that it will have."""
        self.options.setdefault("task_id", _id or uuid())
        return self.app.AsyncResult(self.options["task_id"])

    _freeze = freeze

    def append_to_list_option(self, key: str, value: Any) -> Any:
        items = self.options.setdefault(key, [])
        if not isinstance(items, list):
            items = self.options[key] = [items]
        if value not in items:
            items.append(value)
        return value

    def extend_list_option(self, key: str, value: Any) -> None:
        for item in listed(value):
            Signature.append_to_list_option(self, key, item)

    def link(self, callback: Any) -> Any:
        """Enqueue another task with the result, after success."""
        return self.append_to_list_option("link", callback)

    def link_error(self, errback: Any) -> Any:
        return self.append_to_list_option("link_error", errback)

    def on_error(self, errback: Any) -> Any:
        """Add an error callback, and return this signature."""
        self.link_error(errback)
        return self

    def flatten_links(self) -> list[Any]:
        links = listed(self.options.get("link"))
        return [self, *itertools.chain.from_iterable(maybe_signature(item).flatten_links() for item in links)]

    stamp = Refused("Headers travel to every part: .set(headers={…}), or middleware.")
    election = Refused("Give the call a task_id: the same id is one call.")

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, Signature):
            return NotImplemented
        new: Any = self.TYPES["chain"]
        return new(self, other, app=self._app)

    __ior__ = __or__  # otherwise `|=` would merge the dictionaries

    # -- as text and data

    def reprcall(self, *args: Any, **kwargs: Any) -> str:
        positional, keywords, _ = self._merge(args, kwargs)
        return f"{self['task']}({', '.join([*map(repr, positional), *(f'{k}={v!r}' for k, v in keywords.items())])})"

    def __repr__(self) -> str:
        return self.reprcall()

    def __deepcopy__(self, memo: Any) -> Any:
        new = type(self).__new__(type(self))
        dict.__init__(new, deepcopy(dict(self), memo))
        new._app = self._app
        return new

    def __json__(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return signature, (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def signature(varies: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a signature of a task, of a task's name, or from a signature's data."""
    app = kwargs.get("app")
    if isinstance(varies, Signature):
        return varies.clone()
    if isinstance(varies, dict):
        return Signature.from_dict(varies, app=app)
    return Signature(varies, *args, **kwargs)


def maybe_signature(d: Any, app: Any = None, clone: bool = False) -> Any:
    """Return a signature from a signature, its data or a task; None for None."""
    if isinstance(d, Signature):
        result = d.clone() if clone else d
    elif isinstance(d, dict):
        result = Signature.from_dict(d, app)
    elif d is None:
        return None
    else:
        result = d.s() if hasattr(d, "apply_async") else d
    if app is not None and isinstance(result, Signature):
        result._app = app
    return result
