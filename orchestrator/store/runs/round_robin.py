"""Find what waits by turns, so that no tree of runs keeps the others waiting, however much of it waits.

The ids of runs that came of one another begin with the same time stamp (`domain/ids.py`). So a tree is a range of ids,
and the next tree of which anything waits is one probe of an index over ids away.
"""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.domain.ids import tree_of
from orchestrator.store.sql import Prepared, Row

_FIRST = bytes(16)


class RoundRobin:
    """Waiting rows of a table, some of each tree at a time; it remembers where it stopped."""

    def __init__(self, name: str, table: str, where: str, columns: str, *, run: str = "id") -> None:
        last = "(left(tree.first::text, 13) || '-ffff-ffff-ffffffffffff')::uuid"
        self._find = Prepared[Row](f"""
WITH /* {name} */ RECURSIVE tree (first, number) AS (
    (SELECT {run}, 1 FROM orchestrator.{table} WHERE {where} AND {run} > %(after)s::uuid ORDER BY {run} LIMIT 1)
     UNION ALL
    SELECT next.run, tree.number + 1 FROM tree
     CROSS JOIN LATERAL (
           SELECT {run} AS run FROM orchestrator.{table}
            WHERE {where} AND {run} > {last} ORDER BY {run} LIMIT 1) AS next
     WHERE tree.number < %(limit)s
), share AS (
    SELECT ceil(%(limit)s::float8 / greatest(count(*), 1))::int AS most FROM tree
)
SELECT tree.first AS tree, part.* FROM tree CROSS JOIN share
 CROSS JOIN LATERAL (
       SELECT {columns} FROM orchestrator.{table} AS w
        WHERE {where} AND {run} >= tree.first AND {run} <= {last} ORDER BY w.{run}, w.id LIMIT share.most) AS part
""")
        self._after = _FIRST

    def __call__(self, connection: Connection, limit: int) -> list[Row]:
        """Return what is next: of each tree about the same number, its first before the second of any."""
        rows = self._find(connection, after=self._after, limit=limit)
        if not rows and self._after != _FIRST:
            rows = self._find(connection, after=_FIRST, limit=limit)
        trees: dict[bytes, list[Row]] = {}
        for row in rows:
            trees.setdefault(row.tree, []).append(row)
        is_last = len(trees) < limit
        self._after = _FIRST if is_last else tree_of(max(trees)).ljust(16, b"\xff")
        turns = max(map(len, trees.values()), default=0)
        return [tree[turn] for turn in range(turns) for tree in trees.values() if turn < len(tree)]
