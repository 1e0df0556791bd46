"""A call of a task as data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

from orchestrator.compat.celery.app.current import app_or_default
from orchestrator.compat.celery.exceptions import Refused
from orchestrator.compat.celery.utils import listed, uuid


class Signature(dict[str, Any]):
    """A call of a task as data: its name, arguments and options. It is a dictionary, and so JSON."""

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
        """Let signatures of a type be made from their data."""

        def register(subclass: type[Signature]) -> type[Signature]:
            cls.TYPES[name or subclass.__name__] = subclass
            return subclass

        return register

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], app: Any = None) -> Signature:
        kind = cls.TYPES.get(d.get("subtask_type") or "", Signature)
        made = kind.__new__(kind)
        dict.__init__(made, {"args": (), "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False, **d})
        made._app = app
        made._restore()
        return made

    def _restore(self) -> None:
        """Make signatures of the data in it."""

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
        """Run it here, and return how it ended."""
        args, kwargs, options = self._merge(args, kwargs, options)
        return self.type.apply(args, kwargs, **options)

    def apply_async(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Have workers run it, with options of the call."""
        args, kwargs, options = self._merge(args, kwargs, options)
        known = self.app.tasks.get(self["task"])
        if known is not None:
            return known.apply_async(args, kwargs, **options)
        return self.app.send_task(self["task"], args, kwargs, **options)

    def __invert__(self) -> Any:
        return self.apply_async().get()

    # -- changing

    def clone(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **opts: Any) -> Any:
        """Return a copy, with further arguments and options."""
        copied = deepcopy(self)
        if args or kwargs or opts:
            copied["args"], copied["kwargs"], copied["options"] = copied._merge(args, kwargs, opts)
        return copied

    partial = clone

    def replace(self, args: Any = None, kwargs: Any = None, options: Any = None) -> Any:
        copied = deepcopy(self)
        for name, value in (("args", args), ("kwargs", kwargs), ("options", options)):
            if value is not None:
                copied[name] = value
        return copied

    def set(self, immutable: bool | None = None, **options: Any) -> Any:
        if immutable is not None:
            self.set_immutable(immutable)
        self.options.update(options)
        return self

    def set_immutable(self, immutable: bool) -> None:
        """Take nothing from what precedes it, or take it again."""
        self["immutable"] = immutable

    def freeze(self, _id: str | None = None, **_: Any) -> Any:
        """Choose the id of the call; return its result, which there will be."""
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
        for one in listed(value):
            Signature.append_to_list_option(self, key, one)

    def link(self, callback: Any) -> Any:
        """Call another with the result, after success."""
        return self.append_to_list_option("link", callback)

    def link_error(self, errback: Any) -> Any:
        return self.append_to_list_option("link_error", errback)

    def on_error(self, errback: Any) -> Any:
        """Do the same as `link_error`, and return this signature."""
        self.link_error(errback)
        return self

    def flatten_links(self) -> list[Any]:
        links = listed(self.options.get("link"))
        return [self, *itertools.chain.from_iterable(maybe_signature(one).flatten_links() for one in links)]

    stamp = Refused("Headers travel to every part: .set(headers={…}), or middleware.")
    election = Refused("Give the call a task_id: the same id is one call.")

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, Signature):
            return NotImplemented
        made: Any = self.TYPES["chain"]
        return made(self, other, app=self._app)

    __ior__ = __or__  # else `|=` would merge two dictionaries

    # -- as text and data

    def reprcall(self, *args: Any, **kwargs: Any) -> str:
        given, named, _ = self._merge(args, kwargs)
        return f"{self['task']}({', '.join([*map(repr, given), *(f'{k}={v!r}' for k, v in named.items())])})"

    def __repr__(self) -> str:
        return self.reprcall()

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self).__new__(type(self))
        dict.__init__(made, deepcopy(dict(self), memo))
        made._app = self._app
        return made

    def __json__(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return signature, (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def signature(varies: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a call: of a task, of its name, or from its data."""
    app = kwargs.get("app")
    if isinstance(varies, Signature):
        return varies.clone()
    if isinstance(varies, dict):
        return Signature.from_dict(varies, app=app)
    return Signature(varies, *args, **kwargs)


def maybe_signature(d: Any, app: Any = None, clone: bool = False) -> Any:
    """Return a signature of what may be one already, its data, a task, or nothing."""
    if isinstance(d, Signature):
        found = d.clone() if clone else d
    elif isinstance(d, dict):
        found = Signature.from_dict(d, app)
    elif d is None:
        return None
    else:
        found = d.s() if hasattr(d, "apply_async") else d
    if app is not None and isinstance(found, Signature):
        found._app = app
    return found
