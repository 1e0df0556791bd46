"""Running workflows in memory, and replaying their histories, in tests."""

from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.replaying import replay
from orchestrator.testing.runs import TestedRun
from orchestrator.testing.workflows import WorkflowTest

__all__ = ["Recording", "TestedRun", "WorkflowTest", "replay"]
