"""Test tasks and workflows in memory, and replay histories."""

from typing import TYPE_CHECKING

from orchestrator.lazy_names import load_lazily

if TYPE_CHECKING:
    from orchestrator.testing.public import *  # noqa: F403
    from orchestrator.testing.public import __all__ as __all__
else:
    __getattr__, __dir__ = load_lazily(globals())
