"""Arguments and results of jobs as data that keep their types, in place of pickles. Other values are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from orchestrator.compat.values import PLAIN, TYPE, Values, tag
from orchestrator.errors import PayloadError
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values.payload import decode_call, encode_call

_SHARED_WITH_CELERY = frozenset((list, datetime, date, time, Decimal, UUID))


class _RQValues(Values):
    read = Values.read | {  # type: ignore[operator]  # a dict
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "timedelta": lambda parts: timedelta(*parts),
        "dict": dict,
    }

    def tagged(self, value: Any) -> Any:
        value_type = type(value)
        if value_type in PLAIN:
            return value
        if value_type is dict:
            if PLAIN.issuperset(map(type, value)) and TYPE not in value:
                return super().tagged(value)
            return tag("dict", [[self.tagged(key), self.tagged(item)] for key, item in value.items()])
        if value_type in (tuple, set, frozenset):
            return tag(value_type.__name__, [self.tagged(item) for item in value])
        if value_type is timedelta:
            return tag("timedelta", [value.days, value.seconds, value.microseconds])
        if value_type is time and value.tzinfo is not None and value.utcoffset() is None:
            return value  # encoding raises an error: the zone would be lost
        return super().tagged(value) if value_type in _SHARED_WITH_CELERY else self.other(value)

    def other(self, value: Any) -> Any:
        raise PayloadError(
            f"A value of type {type(value).__module__}.{type(value).__qualname__} would not keep its type: it is not "
            f"pickled here. Pass data, such as its id or its fields in a dictionary, or give an argument its type as "
            f"the annotation of its parameter."
        )


class _Annotated(_RQValues):
    def other(self, value: Any) -> Any:
        return value


_values = _RQValues()
tagged, untagged = _values.tagged, _values.untagged


def tagged_call(
    name: str, function: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call as data. Annotations of the function can restore types that have no tag."""
    try:
        return _values.tagged_call(args, kwargs)
    except PayloadError:
        if function is None:
            raise
        data = _Annotated().tagged_call(args, kwargs)
        decoded = untagged(decode_call(encode_call(name, *data, limit)))
        if repr(Signature(name, function).restore(*decoded)) != repr((list(args), dict(kwargs))):
            raise
        return data


Perform = Callable[[Callable[..., Any], Callable[[str], Any]], Callable[..., Any]]


class RQApplication(Orchestrator):
    """An application without tasks of its own: a worker calls functions of allowed modules, as RQ does."""

    perform: Perform
    """Returns the function that runs a job; set by `queue.py`."""

    def _adapted(self, function: Callable[..., Any], find: Callable[[str], Any]) -> Callable[..., Any]:
        return type(self).perform(function, find)


app = RQApplication()
