"""docs/settings.md lists all current settings."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

from orchestrator.settings import Settings

REPOSITORY = Path(__file__).parents[2]


def test_the_settings_page_is_up_to_date() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "settings_page.py"))
    page = script["PAGE"].read_text(encoding="utf-8")

    assert page == script["page"](), "run: python scripts/settings_page.py"
    assert [field.name for field in fields(Settings) if f"| `{field.name}` | " not in page] == []
