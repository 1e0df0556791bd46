"""Small helpers that programs import from `celery.utils`, and some of our own."""

from __future__ import annotations

import importlib
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5


def uuid() -> str:
    """Return a new id, as a text."""
    return str(uuid4())


gen_unique_id = uuid


def to_id(task_id: str) -> UUID:
    """Return the id under which a call is stored: its own if that is a UUID, else one that is made of the text."""
    try:
        return UUID(task_id)
    except ValueError:
        return uuid5(NAMESPACE_URL, f"celery:{task_id}")


def imported(given: Any) -> Any:
    """Return what a text names, or what is given."""
    if not isinstance(given, str):
        return given
    module, _, name = given.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


def listed(given: Any) -> list[Any]:
    """Return one, many or nothing as a list."""
    if not given:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
