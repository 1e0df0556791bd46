"""Programs can generate clients from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.api import openapi
from orchestrator.api.routes import ROUTES


def parts(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object of a document with its location."""
    if isinstance(schema, dict):
        yield place, schema
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, item in items:
        yield from parts(item, f"{place}/{name}")


def test_every_array_declares_its_items() -> None:
    lists = [(place, part) for place, part in parts(openapi.document(ROUTES)) if part.get("type") == "array"]
    assert len(lists) > 50
    assert [place for place, part in lists if "items" not in part] == []


def test_every_schema_has_its_own_name_as_its_title() -> None:
    schemas = openapi.document(ROUTES)["components"]["schemas"]
    assert len(schemas) > 50
    assert [name for name, schema in schemas.items() if schema.get("title") != name] == []
