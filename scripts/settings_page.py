"""Write the table of docs/settings.md from orchestrator/settings.py: python scripts/settings_page.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from orchestrator.settings import Settings

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "settings.md"
HEAD = "| setting | default | |\n|---|---|---|\n"


def rows() -> Iterator[str]:
    """Yield a row for each setting, with the docstring below its field."""
    module = ast.parse((REPOSITORY / "orchestrator" / "settings.py").read_text(encoding="utf-8"))
    [body] = [node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == Settings.__name__]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id}: no docstring"
            default = getattr(Settings, field.target.id)
            displayed = f"{default:.12g}" if isinstance(default, float) else default
            yield f"| `{field.target.id}` | {displayed} | {ast.literal_eval(text.value)} |\n"


def page() -> str:
    """Return the page with a newly generated table; the text above the table stays."""
    return PAGE.read_text(encoding="utf-8").partition(HEAD)[0] + HEAD + "".join(rows())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
