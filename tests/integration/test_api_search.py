"""Search by parts of names and arguments; and a reset that no leader applies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.sdk.backend import code as code_backend
from tests.integration.api_house import House, furnished
from tests.integration.test_audit import code_run
from tests.integration.test_dashboard_lists import enqueue


@pytest.fixture
def house(database_url: str, redis_url: str) -> Iterator[House]:
    with furnished(database_url, redis_url) as found:
        yield found


def test_search_ignores_case_and_stays_in_the_key_scope(house: House) -> None:
    whole = house.make_key(None, None)
    found = house.get("/api/v1/search?text=L-FLO", whole)
    assert [run["id"] for run in found["runs"]] == [str(house.runs["mail"])]
    assert {str(house.tasks[name]) for name in ("mail", "bank")} <= {
        task["id"] for task in house.get("/api/v1/search?text=.A&limit=100", whole)["tasks"]
    }
    assert house.get("/api/v1/search?text=%25", whole)["tasks"] == []  # no wildcard
    assert house.get("/api/v1/search?text=ank-flow")["runs"] == []
    assert {task["queue"] for task in house.get("/api/v1/search?text=.A&limit=100")["tasks"]} == {"mail.out"}


def test_search_finds_tasks_by_arguments(house: House) -> None:
    order, *longer = (enqueue(house, "t.ship", [], {"order": f"o-5{end}"}) for end in ("", "1", "2"))
    whole = house.make_key(None, None)
    found = house.get("/api/v1/search?text=o-5", whole)
    assert [task["id"] for task in found["exact_tasks"]] == [order]
    assert [task["id"] for task in found["tasks_by_argument"]] == longer[::-1]
    assert house.get("/api/v1/search?text=o-5", house.make_key("bank.", None))["exact_tasks"] == []


def test_a_reset_that_no_leader_applies_times_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_backend, "_RESET_LIMIT", 0.3)
    answer = house.send("POST", f"/api/v1/runs/{code_run(house)}/reset", house.make_key(None, None), json={"to": 1})
    assert answer.status_code == 409, answer.text
    assert "was not reset within 0.3 s" in answer.json()["detail"]
