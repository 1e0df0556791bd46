"""Several applications in one database: each has a schema of its own, named after its namespace.

All SQL of this package is written for the default schema, `orchestrator.…`. Where the namespace is another one, the
name is exchanged at one place, on the way to the driver; with the default namespace nothing is in that way.

A shard is a namespace of its own beside the first one (`shards.py`). Some tables are shared by all shards of it.
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
"""How the namespace ends that has views of all shards."""
NOT_SHARED: frozenset[str] = frozenset()
SHARED = frozenset(
    (
        *("workflows", "flows", "queues", "unique_keys", "run_keys", "payload_keeps", "buckets"),
        *("lane_use", "places", "all_runs", "shards"),
        *("api_keys", "sessions", "audit", "services", ""),
    )
)
"""Tables that all shards use together; and no table at all, as in the name of a lock."""
_SHARED_BY_VIEWS = SHARED | {"alembic_version"}


@lru_cache(maxsize=1024)
def in_namespace(sql: str, namespace: str, shared: frozenset[str] = SHARED) -> str:
    """Return a statement that was written for the default schema as one for this namespace's."""
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
    """Let every connection of an engine work in a namespace."""
    if namespace != DEFAULT_NAMESPACE:
        engine.update_execution_options(**{_OPTION: namespace})
        event.listen(engine, "before_cursor_execute", _exchange(namespace, shared), retval=True)


@contextmanager
def borrowed(connection: Connection, namespace: str) -> Iterator[None]:
    """Let a foreign connection work in a namespace while the block lasts."""
    if namespace == DEFAULT_NAMESPACE:
        yield
        return
    exchange = _exchange(namespace)
    event.listen(connection, "before_cursor_execute", exchange, retval=True)
    connection.info[_OPTION] = namespace
    try:
        yield
    finally:
        if not connection.closed:
            connection.info.pop(_OPTION, None)
        event.remove(connection, "before_cursor_execute", exchange)


def namespace_of(connection: Connection | Engine) -> str:
    """Return the namespace in which a connection works now, or all those of an engine of our own."""
    lent = connection.info.get(_OPTION) if isinstance(connection, Connection) else None
    namespace: str = lent or connection.get_execution_options().get(_OPTION, DEFAULT_NAMESPACE)
    return namespace


def root_of(connection: Connection | Engine) -> str:
    """Return the same without the shard."""
    return namespace_of(connection).partition("/")[0]


def _exchange(namespace: str, shared: frozenset[str] = SHARED) -> Callable[..., tuple[str, Any]]:
    """Return a new listener, so that one that was added twice can be removed once."""

    def exchange(
        _connection: object, _cursor: object, statement: str, parameters: Any, _context: object, _many: bool
    ) -> tuple[str, Any]:
        return in_namespace(statement, namespace, shared), parameters

    return exchange
