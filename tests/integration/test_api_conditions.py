"""Definitions over HTTP: comparing them, and conditional applies with entity tags (RFC 9110, 13)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.api_client import ApiClient, bare_api, bare_settings, empty_engine  # noqa: F401

PATH = "/api/v1/workflows"
BODY: dict[str, Any] = {
    "name": "tagged",
    "params": {"zeta": {"type": "integer", "default": 1}, "alpha": {"type": "string", "default": "a"}},
    "tasks": {"second": {"task": "t.b", "input": {"z": 1, "a": 2}}, "first": {"task": "t.a"}},
}


def ask(api: ApiClient, method: str, path: str, body: Any = None, **headers: str) -> Any:
    return api.send(method, path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def apply(api: ApiClient, description: str = "", **headers: str) -> Any:
    return ask(api, "POST", PATH, {"definition": BODY | {"description": description}}, **headers)


def test_an_unchanged_definition_has_no_diff(api: ApiClient) -> None:
    before = ask(api, "POST", f"{PATH}/diff", {"definition": BODY}).json()
    assert (before["changed"], before["version"], before["stored"]) == (True, None, "")
    apply(api).raise_for_status()
    same = ask(api, "POST", f"{PATH}/diff", {"definition": BODY | {"description": ""}}).json()
    assert (same["changed"], same["version"]) == (False, 1)
    assert same["stored"] == same["given"]
    other = ask(api, "POST", f"{PATH}/diff", {"definition": BODY | {"description": "more"}}).json()
    assert other["changed"]
    assert "more" in other["given"]
    assert "more" not in other["stored"]


def test_apply_returns_the_same_etag_as_a_read(api: ApiClient) -> None:
    first = apply(api)
    assert first.headers["ETag"] == ask(api, "GET", f"{PATH}/tagged").headers["ETag"]
    assert apply(api).headers["ETag"] == first.headers["ETag"]  # unchanged
    assert apply(api, "other").headers["ETag"] == ask(api, "GET", f"{PATH}/tagged").headers["ETag"]


def test_the_unversioned_routes_support_conditional_requests(api: ApiClient) -> None:
    tag = ask(api, "POST", "/workflows", BODY, If_None_Match="*").headers["ETag"]
    assert ask(api, "GET", "/workflows/tagged", If_None_Match=tag).status_code == 304
    assert ask(api, "POST", "/workflows", BODY, If_None_Match="*").status_code == 412


def test_if_none_match_any_rejects_an_existing_workflow(api: ApiClient) -> None:
    assert apply(api, If_None_Match="*").json()["version"] == 1
    refused = apply(api, "other", If_None_Match="*")
    assert refused.status_code == 412
    assert refused.json()["detail"].startswith("Workflow 'tagged' should be new, but there is version 1")
    ask(api, "DELETE", f"{PATH}/tagged").raise_for_status()
    assert apply(api, "other", If_None_Match="*").json()["version"] == 2  # a deleted workflow does not exist


def test_if_match_accepts_any_or_one_of_several_etags(api: ApiClient) -> None:
    missing = apply(api, If_Match="*")
    assert (missing.status_code, ask(api, "GET", f"{PATH}/tagged").status_code) == (412, 404)
    tag = apply(api).headers["ETag"]
    assert apply(api, "two", If_Match="*").json()["version"] == 2
    assert apply(api, "three", If_Match=tag).status_code == 412
    newest = ask(api, "GET", f"{PATH}/tagged").headers["ETag"]
    weak = apply(api, "three", If_Match=f"W/{newest}")
    assert weak.status_code == 412  # strong comparison: a weak tag never matches
    assert apply(api, "three", If_Match=f'"0", {newest}').json()["version"] == 3
    assert apply(api, "four", If_None_Match=f'"0", {tag}').json()["version"] == 4
    newest = ask(api, "GET", f"{PATH}/tagged").headers["ETag"]
    assert apply(api, "five", If_None_Match=f"W/{newest}").status_code == 412  # weak comparison


@pytest.mark.parametrize("header", ["If_Match", "If_None_Match"])
@pytest.mark.parametrize("value", ["7", '"a" "b"', '"a', "", "*, *"])
def test_an_unparsable_precondition_is_rejected(api: ApiClient, header: str, value: str) -> None:
    answer = apply(api, **{header: value})
    assert answer.status_code == 400
    assert header.replace("_", "-") in answer.json()["detail"]
    assert ask(api, "GET", f"{PATH}/tagged").status_code == 404
