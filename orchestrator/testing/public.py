"""The names that `from orchestrator.testing import …` gives."""

from orchestrator.sdk.code.engine import replay
from orchestrator.sdk.code.recording import Recording
from orchestrator.testing.records import StartedRun, TestedTask
from orchestrator.testing.runs import TestedRun
from orchestrator.testing.tasks import TaskTest, eager, recording
from orchestrator.testing.workflows import After, WorkflowTest

__all__ = [
    "After",
    "Recording",
    "StartedRun",
    "TaskTest",
    "TestedRun",
    "TestedTask",
    "WorkflowTest",
    "eager",
    "recording",
    "replay",
]
