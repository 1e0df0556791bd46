"""A durable task queue and workflow engine: Postgres holds the truth, Redis Streams carry the work."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestrator.public import *  # noqa: F403
    from orchestrator.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Load the public names: who imports a part, such as pytest its plugin, does without them."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        globals()[name] = found = getattr(import_module("orchestrator.public"), name)
        return found
