"""How the fields of a definition are written in a file. It stands beside each field, for the reader and for editors."""

from __future__ import annotations

from typing import Any


class Key:
    """A field that a file can say: what kind of value it holds, and what it means. Others are not for files."""

    def __init__(self, kind: str, doc: str = "", **rules: Any) -> None:
        self.kind = kind
        """A name in `orchestrator.sdk.dag.fields.KINDS`, or `own` where the reader has one for this field alone."""
        self.doc = doc
        self.rules = rules
        """What else the JSON schema says of the value, such as `minimum`."""
