"""Document async twins in the API reference: griffe does not see a method in the line `acancel = twin(cancel)`."""

from __future__ import annotations

from typing import Any

import griffe


class Twins(griffe.Extension):
    """Add the name of the async twin to the docstring of a method."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Document the twins among the members of a class."""
        for name, member in cls.members.items():
            call, _, arguments = str(getattr(member, "value", "")).partition("(")
            if call == "twin":
                method = cls.members[arguments.rstrip(")").partition(",")[0]]
                assert method.docstring is not None
                method.docstring.value += f"\n\nOn an event loop: `await ….{name}(…)`."
