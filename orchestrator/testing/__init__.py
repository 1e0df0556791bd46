"""Tasks and workflows in memory, and replaying histories, in tests."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.testing.public import *  # noqa: F403
    from orchestrator.testing.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Load the public names: pytest, which loads the plugin, does without them."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        globals()[name] = found = getattr(import_module("orchestrator.testing.public"), name)
        return found
