"""The OpenAPI document, built from the routes, and an HTML page of it that loads nothing from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from inspect import cleandoc
from typing import Any

import msgspec
from starlette.responses import Response

from orchestrator.api.endpoints import Endpoint
from orchestrator.api.problems import MEDIA_TYPE, Problem

_REF = "#/components/schemas/{name}"
_TAG = r'^("[0-9a-f]+"|\*)$'
_PROBLEMS = {
    400: "The body is not JSON, or the request cannot be fulfilled.",
    401: "A valid key is required.",
    403: "The key does not allow this, or a page of a different site sent the request.",
    404: "Not found.",
    409: "The state does not allow this, the unique key is in use, or there was no answer in time.",
    412: "The resource has changed since it was read.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or the state of the run is.",
    415: "The body has a Content-Encoding.",
    422: "The request is invalid; `errors` names the fields.",
    429: "Too many requests, or a quota is used up; retry after `Retry-After` seconds.",
    500: "Internal error.",
    503: "Postgres or Redis is unavailable; retry after `Retry-After` seconds.",
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    types = [kind for endpoint in endpoints for kind in _types(endpoint)]
    schemas, components = msgspec.json.schema_components([*types, Problem], ref_template=_REF)
    components = {name: _plain(schema) | {"title": name} for name, schema in components.items()}
    schemas_by_type = {id(kind): _plain(schema) for kind, schema in zip([*types, Problem], schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas_by_type, components)
    _link(endpoints, paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "orchestrator",
            "version": metadata.version("durable-orchestrator"),
            "description": "A durable task queue and workflow engine. Errors are problem details (RFC 9457).",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(endpoint.tag for endpoint in endpoints)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "bearerFormat": "orc_…"}},
        },
    }


def _link(endpoints: Sequence[Endpoint], paths: dict[str, dict[str, Any]]) -> None:
    """Add OpenAPI links from a response to routes for its id: of a new task, or of the first run in a list."""
    for endpoint in endpoints:
        linked = _linked_objects(endpoint)
        if linked is None:
            continue
        base, pointer = linked
        links = {
            operation["operationId"]: {
                "operationId": operation["operationId"],
                "parameters": {"id": f"$response.body#/{pointer}"},
            }
            for path, operations in paths.items()
            if path.startswith(f"{base}/{{id}}")
            for operation in operations.values()
        }
        paths[endpoint.path][endpoint.method.lower()]["responses"][str(endpoint.status)]["links"] = links


def _linked_objects(endpoint: Endpoint) -> tuple[str, str] | None:
    """Return the path of the objects in a response, and the JSON pointer to the first one's id."""
    top = endpoint.path[: -len("/bulk")] if endpoint.path.endswith("/bulk") else endpoint.path
    base = re.sub(r"/workflows/{name}(/runs)$", r"\1", top)
    if endpoint.path.startswith("/tasks") or endpoint.method == "DELETE" or "{" in base:  # flows use ?id=
        return None
    if not base.endswith(("/tasks", "/runs", "/quarantine")):
        return None
    fields = [field.name for field in msgspec.structs.fields(endpoint.answer)] if _is_described(endpoint) else []
    pointers = {"id": "id", "ids": "ids/0", "items": "items/0/id", "messages": "messages/0/id"}
    return next(((base, pointers[name]) for name in fields if name in pointers), None)


def _plain(schema: Any) -> Any:
    """Simplify a schema for client generators, of which few know `prefixItems` or untyped lists.

    A tuple becomes a list of any of its item types, and every list declares its items.
    """
    if isinstance(schema, (list, tuple)):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _plain(item) for name, item in schema.items()}
    if "prefixItems" in found:
        found["items"] = {"anyOf": found.pop("prefixItems")}
    if found.get("type") == "array":
        found.setdefault("items", {})
    if isinstance(description := found.get("description"), str):
        found["description"] = cleandoc(description)  # Python does this itself from 3.13 on
    return found


def _types(endpoint: Endpoint) -> Iterable[Any]:
    yield from endpoint.path_params.values()
    yield from (kind for kind in (endpoint.query, endpoint.body) if kind is not None)
    if _is_described(endpoint):
        yield endpoint.answer


def _is_described(endpoint: Endpoint) -> bool:
    return endpoint.answer is not None and endpoint.answer is not Response and not endpoint.is_live


def _operation(endpoint: Endpoint, schema_by_type: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema_by_type[id(kind)]}
        for name, kind in endpoint.path_params.items()
    ]
    if endpoint.query is not None:
        parameters += _query(schema_by_type[id(endpoint.query)], components)
    parameters += [_header(*header) for header in _headers(endpoint)]
    found: dict[str, Any] = {
        "operationId": endpoint.call.__name__ if endpoint.path.startswith("/api") else f"root_{endpoint.call.__name__}",
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": parameters,
        "responses": {
            str(endpoint.status): {"description": endpoint.summary, "content": _content(endpoint, schema_by_type)},
            **(
                {}
                if endpoint.is_pending is None
                else {"202": {"description": "Kept", "content": _content(endpoint, schema_by_type)}}
            ),
            **(
                {"204": {"description": "The `end` event was sent already; do not reconnect."}}
                if endpoint.is_live
                else {}
            ),
            **({"304": {"description": "Not modified."}} if _has_etag(endpoint) else {}),
            **({"204": {"description": "Nothing available."}} if endpoint.may_be_empty else {}),
            **{
                str(status): {"description": words, "content": {MEDIA_TYPE: {"schema": schema_by_type[id(Problem)]}}}
                for status, words in _PROBLEMS.items()
            },
        },
    }
    if endpoint.scope is not None:
        found["security"] = [{"key": []}]
        found["x-scope"] = str(endpoint.scope)
    if endpoint.description:
        found["description"] = endpoint.description
    if endpoint.body is not None:
        content: dict[str, Any] = {"schema": schema_by_type[id(endpoint.body)]}
        if endpoint.examples:
            content["examples"] = {str(number): {"value": one} for number, one in enumerate(endpoint.examples, 1)}
        found["requestBody"] = {
            "required": _needs(schema_by_type[id(endpoint.body)], components),
            "content": {"application/json": content},
        }
        if endpoint.takes_yaml:
            found["requestBody"]["content"]["application/yaml"] = {"schema": {"type": "string"}}
    return found


def _content(endpoint: Endpoint, schema_by_type: dict[int, Any]) -> dict[str, Any]:
    if endpoint.is_live:
        schema = {"type": "string", "description": "Server-sent events, with JSON as data."}
    else:
        schema = schema_by_type[id(endpoint.answer)] if _is_described(endpoint) else {}
    return {endpoint.media_type: {"schema": schema}}


def _has_etag(endpoint: Endpoint) -> bool:
    return endpoint.etag is not None and endpoint.method == "GET"


def _headers(endpoint: Endpoint) -> Iterable[tuple[str, str, str]]:
    """Yield the headers that a route reads, with description and pattern."""
    if endpoint.takes_key:
        yield "Idempotency-Key", "Requests with the same key take effect once.", ""
    if endpoint.is_live:
        yield "Last-Event-ID", "The `id` of the last received event: the stream continues after it.", ""
    if _has_etag(endpoint):
        yield "If-None-Match", "Return 304, without a body, if this is still the `ETag`.", _TAG
    if endpoint.takes_match:
        undone = "Change nothing, and return 412, if this is {} the `ETag`; `*` matches any."
        yield "If-Match", undone.format("no longer"), _TAG
        yield "If-None-Match", undone.replace("{} ", ""), _TAG


def _header(name: str, description: str, pattern: str) -> dict[str, Any]:
    schema = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _resolved(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    found: dict[str, Any] = components[reference.rpartition("/")[2]] if reference else schema
    return found


def _needs(schema: dict[str, Any], components: dict[str, Any]) -> bool:
    return bool(_resolved(schema, components).get("required"))


def _query(schema: dict[str, Any], components: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of a struct as query parameters."""
    structure = _resolved(schema, components)
    return [
        {"name": name, "in": "query", "required": name in structure.get("required", ()), "schema": kind}
        for name, kind in structure["properties"].items()
    ]


def page(endpoints: Sequence[Endpoint]) -> str:
    """Return an HTML page of the routes."""
    rows = []
    for tag in dict.fromkeys(endpoint.tag for endpoint in endpoints):
        rows.append(f"<h2>{html.escape(tag)}</h2>")
        for one in (endpoint for endpoint in endpoints if endpoint.tag == tag):
            more = f"<p>{html.escape(one.description)}</p>" if one.description else ""
            example = "".join(
                f"<pre>{html.escape(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())}</pre>"
                for value in one.examples
            )
            rows.append(
                f"<details><summary><b>{one.method}</b> <code>{html.escape(one.path)}</code> "
                f"{html.escape(one.summary)} <i>{one.scope or ''}</i></summary>{more}{example}</details>"
            )
    return _PAGE.format(routes="\n".join(rows))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>orchestrator: HTTP API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
summary {{ cursor: pointer; padding: .25rem 0 }}
b {{ display: inline-block; width: 4.5rem; font-family: ui-monospace, monospace }}
i {{ opacity: .6; font-style: normal; font-size: .8rem }}
pre {{ padding: .75rem; border: 1px solid; border-radius: .4rem; overflow: auto }}
</style></head><body>
<h1>orchestrator: HTTP API</h1>
<p>The whole document, for programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).
Errors are problem details (RFC 9457).</p>
{routes}
</body></html>
"""
