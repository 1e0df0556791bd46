"""Running workflows in memory, and replaying their histories, in tests."""

from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.replaying import replay
from orchestrator.testing.mocks import After
from orchestrator.testing.runs import TestedRun
from orchestrator.testing.workflows import WorkflowTest

__all__ = ["After", "Recording", "TestedRun", "WorkflowTest", "replay"]
