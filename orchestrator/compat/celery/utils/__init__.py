"""Helpers that programs import from `celery.utils`, and internal ones."""

from __future__ import annotations

import importlib
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5


def uuid() -> str:
    """Return a new id as text."""
    return str(uuid4())


gen_unique_id = uuid


def to_id(task_id: str) -> UUID:
    """Return the UUID of a call: its id if that is a UUID, otherwise one derived from the text."""
    try:
        return UUID(task_id)
    except ValueError:
        return uuid5(NAMESPACE_URL, f"celery:{task_id}")


def imported(value: Any) -> Any:
    """Import the object that a text names; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    module, _, name = value.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


def listed(value: Any) -> list[Any]:
    """Return a list, from one item, several items or nothing."""
    if not value:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
