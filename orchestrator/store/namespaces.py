"""Several applications in one database: each namespace is a schema.

All SQL in this package is written for the default schema, `orchestrator.…`. For another namespace, `in_namespace`
replaces the schema's name just before the driver; the default namespace costs nothing.

A shard is a namespace beside the first one (`shards.py`). The shards of an application share some tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, event

from orchestrator.settings import DEFAULT_NAMESPACE

_OPTION = "orchestrator_namespace"
_TABLE = re.compile(rf"\b{DEFAULT_NAMESPACE}\.(\w*)")
ALL = "/all"
"""The suffix of the namespace that has the views over all shards."""
NOT_SHARED: frozenset[str] = frozenset()
SHARED = frozenset(
    (
        *("workflows", "flows", "queues", "unique_keys", "run_keys", "payload_keeps", "buckets"),
        *("lane_use", "places", "all_runs", "shards"),
        *("api_keys", "sessions", "audit", "services", ""),
    )
)
"""Tables that all shards share; the empty name stands for a name that is not a table's, as in a lock."""
_SHARED_BY_VIEWS = SHARED | {"alembic_version"}


@lru_cache(maxsize=1024)
def in_namespace(sql: str, namespace: str, shared: frozenset[str] = SHARED) -> str:
    """Return a statement for the default schema as a statement for this namespace."""
    if namespace == DEFAULT_NAMESPACE:
        return sql
    root, slash, _ = namespace.partition("/")
    common = "" if not slash else root if root == DEFAULT_NAMESPACE else f'"{root}"'
    if common and namespace.endswith(ALL):
        shared = _SHARED_BY_VIEWS
    return _TABLE.sub(
        lambda found: f"{common}.{found[1]}" if common and found[1] in shared else f'"{namespace}".{found[1]}', sql
    )


def use_namespace(engine: Engine, namespace: str, shared: frozenset[str] = SHARED) -> None:
    """Make every connection of an engine work in a namespace."""
    if namespace != DEFAULT_NAMESPACE:
        engine.update_execution_options(**{_OPTION: namespace})
        event.listen(engine, "before_cursor_execute", _replacing(namespace, shared), retval=True)


@contextmanager
def borrowed(connection: Connection, namespace: str) -> Iterator[None]:
    """Make a foreign connection work in a namespace during the block."""
    if namespace == DEFAULT_NAMESPACE:
        yield
        return
    replace = _replacing(namespace)
    event.listen(connection, "before_cursor_execute", replace, retval=True)
    connection.info[_OPTION] = namespace
    try:
        yield
    finally:
        if not connection.closed:
            connection.info.pop(_OPTION, None)
        event.remove(connection, "before_cursor_execute", replace)


def namespace_of(connection: Connection | Engine) -> str:
    """Return the current namespace of a connection, or the namespace of an engine."""
    borrowed_namespace = connection.info.get(_OPTION) if isinstance(connection, Connection) else None
    namespace: str = borrowed_namespace or connection.get_execution_options().get(_OPTION, DEFAULT_NAMESPACE)
    return namespace


def root_of(connection: Connection | Engine) -> str:
    """Return the current namespace without the shard."""
    return namespace_of(connection).partition("/")[0]


def _replacing(namespace: str, shared: frozenset[str] = SHARED) -> Callable[..., tuple[str, Any]]:
    """Return a new listener: SQLAlchemy adds the same function only once, so nested blocks need two."""

    def replace(
        _connection: object, _cursor: object, statement: str, parameters: Any, _context: object, _many: bool
    ) -> tuple[str, Any]:
        return in_namespace(statement, namespace, shared), parameters

    return replace
