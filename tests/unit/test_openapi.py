"""The OpenAPI document is one that programs make clients of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.api import openapi
from orchestrator.api.routes import ROUTES


def parts(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object of a document, with its place."""
    if isinstance(schema, dict):
        yield place, schema
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, item in items:
        yield from parts(item, f"{place}/{name}")


def test_every_list_says_what_it_is_of() -> None:
    lists = [(place, part) for place, part in parts(openapi.document(ROUTES)) if part.get("type") == "array"]
    assert len(lists) > 50
    assert [place for place, part in lists if "items" not in part] == []


def test_every_schema_has_its_own_name_as_its_title() -> None:
    schemas = openapi.document(ROUTES)["components"]["schemas"]
    assert len(schemas) > 50
    assert [name for name, schema in schemas.items() if schema.get("title") != name] == []
