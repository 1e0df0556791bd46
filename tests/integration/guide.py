"""The examples of docs/executors.md, for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.registry import built_in, option_problems
from orchestrator.sdk.dag.definitions import loads

_PAGE = Path(__file__).parents[2] / "docs" / "executors.md"


def example(executor: str) -> tuple[ExecutorOptions, dict[str, Any]]:
    """Return the options and the input of an executor's example on the page."""
    section = _PAGE.read_text(encoding="utf-8").split(f"\n## {executor}\n")[1].split("\n## ")[0]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    loads(block[1])  # validates the whole definition
    [step] = yaml.safe_load(block[1])["tasks"].values()
    assert step["executor"] == executor
    kind = built_in(executor)
    assert kind is not None
    assert option_problems(kind, step["with"]) == []
    return msgspec.convert(step["with"], kind), step["input"]
