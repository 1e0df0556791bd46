"""Tells the reference of async twins: `acancel = twin(cancel)` is one line in the source, and no method to griffe."""

from __future__ import annotations

from typing import Any

import griffe


class Twins(griffe.Extension):
    """Names the twin of a method in what is said of the method."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Look for twins among the members of a class."""
        for name, member in cls.members.items():
            call, _, arguments = str(getattr(member, "value", "")).partition("(")
            if call == "twin":
                method = cls.members[arguments.rstrip(")").partition(",")[0]]
                assert method.docstring is not None
                method.docstring.value += f"\n\nOn an event loop: `await ….{name}(…)`."
