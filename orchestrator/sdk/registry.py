"""What an application has registered, found by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.errors import UnknownTask, did_you_mean
from orchestrator.sdk.modules import Modules
from orchestrator.sdk.tasks.options import check_name

if TYPE_CHECKING:
    from orchestrator.sdk.code.workflow import CodeWorkflow, CodeWorkflows
    from orchestrator.sdk.tasks.task import Task


@dataclass(frozen=True)
class Registry:
    """Tasks and workflows as code, and the modules in which there may be more."""

    tasks: dict[str, Task[..., Any]]
    workflows: CodeWorkflows
    modules: Modules

    def find_task(self, name: str) -> Task[..., Any]:
        """Return the task of that name."""
        if check_name("task", name) not in self.tasks:
            self.modules.load()
        try:
            return self.tasks[name]
        except KeyError:
            known = ", ".join(sorted(self.tasks)) or "none"
            raise UnknownTask(f"No task is called {name!r}.{did_you_mean(name, self.tasks)} Known: {known}.") from None

    def find(self, name: str) -> Task[..., Any] | CodeWorkflow[..., Any]:
        """Return the task of that name, or else the workflow."""
        found = self._registered(name)
        if found is None:
            self.modules.load()
            found = self._registered(name)
        if found is None:
            known = sorted({*self.tasks, *self.workflows})
            raise UnknownTask(
                f"No task and no workflow is called {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        return found

    def _registered(self, name: str) -> Task[..., Any] | CodeWorkflow[..., Any] | None:
        return self.tasks.get(name) or self.workflows.get(name)
