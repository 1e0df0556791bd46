"""A durable task queue and workflow engine: Postgres stores all state, Redis Streams carry the work."""

from typing import TYPE_CHECKING

from orchestrator.lazy_names import load_lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestrator.public import *  # noqa: F403
    from orchestrator.public import __all__ as __all__
else:
    __getattr__, __dir__ = load_lazily(globals())
