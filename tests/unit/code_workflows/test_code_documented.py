"""The guides document every public name of code workflows and of the testing tools."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from orchestrator import CodeWorkflow, RunInfo, Signals, WorkflowContext, WorkflowHandle, testing
from orchestrator.sdk.code.options import CodeOptions
from orchestrator.sdk.code.starting import Starting

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("code-workflows.md", "testing.md"))
CLASSES = (CodeWorkflow, Starting, WorkflowContext, WorkflowHandle, Signals)
TESTING = (testing.WorkflowTest, testing.TestedRun, testing.Recording)


def test_every_public_name_is_in_a_guide() -> None:
    names = {
        *testing.__all__,
        *(kind.__name__ for kind in (*CLASSES, RunInfo) if kind is not Starting),
        *(field.name for kind in (CodeOptions, RunInfo) for field in dataclasses.fields(kind)),
        *(name for kind in (*CLASSES, *TESTING) for name in dir(kind) if not name.startswith("_")),
    }
    variants = {name for name in names if name[:1] == "a" and name[1:] in names}
    missing = sorted(name for name in names - variants if not re.search(rf"\b{name}\b", GUIDE))
    assert missing == []
