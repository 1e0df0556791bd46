"""The approvals inbox and the pages of flows: pending decisions are listed, and decided once within a key's scope."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import re
from datetime import UTC, datetime
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from orchestrator import Orchestrator
from orchestrator.api import access
from orchestrator.api.app import create_app
from orchestrator.api.dashboard.pages.flows import graphs
from orchestrator.domain.access import Scope, Secret
from orchestrator.domain.flow.definition import Flow
from orchestrator.errors import ResultTimeout, WrongState
from orchestrator.sdk.backend import Backend, code_requests
from orchestrator.sdk.values.payload import encode_value
from orchestrator.store import insights, throughput
from tests.emptying import empty
from tests.integration.api_client import make_key
from tests.integration.api_house import House, changes
from tests.integration.visitor import Visitor
from tests.integration.waiting_house import FLOW_WITH_APPROVAL, code_that_asks, flow_that_asks


@pytest.fixture
def house(furniture: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    monkeypatch.setattr(access, "_MAX_WRONG_KEYS", 10_000)
    with furniture.engine.connect() as connection:
        empty(connection, "api_keys", "inbox", "promises", "histories")
        connection.exec_driver_sql("DELETE FROM orchestrator.runs WHERE flow OR code")
    return furniture


def log_in(house: House, scope: Scope, workflows: str | None = None) -> Visitor:
    visitor = Visitor(house.app)
    visitor.log_in(make_key(house.engine, scope, "ada", queues=workflows, workflows=workflows))
    return visitor


def test_pending_decisions_are_listed_oldest_first(house: House) -> None:
    assert "No pending approvals" in Visitor(house.app).get("/ui/approvals").text
    code, flow = code_that_asks(house, "mail"), flow_that_asks(house, "mail")
    flow_that_asks(house, "bank", at="again")  # waits for a timer, not for a person
    page = Visitor(house.app).get("/ui/approvals").text
    assert page.index(str(code)) < page.index(str(flow))
    assert "Is it within the budget?" in page
    assert "1100" in page
    assert re.search(r"<dt>amount</dt><dd>1250</dd>", page), "what the run with the promise was given"
    assert "bank-asks" not in page
    with house.engine.connect() as connection:
        promise, approval = insights.page_of_approvals(connection, limit=10).approvals
    assert (promise.kind, promise.name, approval.kind, approval.name) == ("promise", "approval-1", "approval", "ask")
    for found, seconds in ((promise, 3_600), (approval, 600)):
        assert abs((datetime.now(UTC) - found.since).total_seconds() - seconds) < 60


def test_an_approval_shows_the_parameters_of_its_run_by_name(house: House) -> None:
    code_that_asks(house, "named")
    flow_that_asks(house, "named", fields=None)
    with house.engine.connect() as connection:
        known = json.dumps([{"name": "text"}, {"name": "amount"}])
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.task_parameters VALUES ('named-code', %s::jsonb)", (known,)
        )
    page = Visitor(house.app).get("/ui/approvals").text
    assert "<dt>text</dt><dd>&#34;pear&#34;</dd>" in page
    assert "<dt>amount</dt><dd>1100</dd>" in page, "its node took nothing"


def test_the_overview_and_the_menu_count_pending_decisions(house: House) -> None:
    def read(path: str = "/ui", key: Secret | None = None) -> str:
        visitor = Visitor(create_app(house.settings))  # a new server, with an empty cache
        if key is not None:
            visitor.log_in(key)
        return visitor.get(path).text

    assert "for a decision" not in read()
    assert " 24" not in read().partition("<main")[2].partition("tiles")[0]
    code_that_asks(house, "mail", promises=2)
    flow_that_asks(house, "bank")
    with house.engine.connect() as connection:
        empty(connection, "throughput")
        none = dict.fromkeys(("success", "cancelled", "skipped", "dispatched", "retried", "lost"), 0)
        counted = none | {"queue": "mail.out", "failed": 245, "waits": [], "runs": []}
        throughput.add(connection, 1, datetime.now(UTC).replace(second=0, microsecond=0), [counted])
    page = read()
    assert "All is well" not in page
    assert "</strong> 3 wait for a decision." in page
    assert re.search(r"</strong> 24\d tasks failed in the last 5 minutes\.", page), "and those of the house"
    menu = re.compile(r'href="/ui/approvals" data-letter="p" +>Approvals <span class="tag">(.+?)</span>')
    assert menu.findall(read("/ui/queues")) == ["3"]
    assert not menu.findall(read("/ui/login")), "no log-in is needed for it"
    key = make_key(house.engine, Scope.READ, "ada", queues="mail", workflows="mail")
    assert menu.findall(read("/ui/queues", key)) == ["2"]


def test_pages_of_approvals_neither_skip_nor_repeat_entries(house: House) -> None:
    made = []
    for place in range(7):
        made += [code_that_asks(house, "mail", promises=1 + place % 3), flow_that_asks(house, "mail")]
    found, after = [], None
    with house.engine.connect() as connection:
        while True:
            page = insights.page_of_approvals(connection, limit=2, after=after)
            found += page.approvals
            after = page.next
            if after is None:
                break
    assert [*dict.fromkeys(one.run for one in found)] == made
    assert len({(one.run, one.name) for one in found}) == len(found) == 7 + 13


def test_an_approval_is_decided_once_and_its_reason_audited(house: House) -> None:
    run = flow_that_asks(house, "mail")
    visitor = Visitor(house.app)
    visitor.get("/ui/approvals")
    visitor.post(f"/ui/runs/{run}/approve", node="ask", why="within the budget", back="/ui/approvals")
    assert visitor.said().startswith("Approved, and the decision is stored: no scheduler leads")
    with house.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT kind FROM orchestrator.inbox").scalars().all() == ["flow signal"]
        detail = connection.exec_driver_sql(
            "SELECT detail FROM orchestrator.audit WHERE target = %s AND act = 'approved'", (str(run),)
        ).scalar_one()
        assert detail["why"] == "within the budget"
    before = changes(house)
    visitor.post(f"/ui/runs/{run}/reject", node="another", back="/ui/approvals")
    assert "It is already decided" in visitor.said()
    assert changes(house) == before


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "Enter a value, such as true"),
        (" ", "Enter a value"),
        ('{"ok": tru', "looks like JSON but is invalid"),
        ("[1", "JSON"),
    ],
)
def test_a_promise_is_not_resolved_by_an_empty_or_malformed_value(house: House, value: str, said: str) -> None:
    run = code_that_asks(house, "mail")
    visitor = Visitor(house.app)
    visitor.get("/ui/approvals")
    before = changes(house)
    visitor.post(f"/ui/runs/{run}/promises/approval-1/resolve", value=value, back="/ui/approvals")
    assert said in visitor.said()
    assert changes(house) == before


def test_a_promise_is_not_resolved_by_a_value_of_another_type(house: House) -> None:
    run = code_that_asks(house, "mail", value_type=bool)
    visitor = Visitor(house.app)
    visitor.get("/ui/approvals")
    before = changes(house)
    visitor.post(f"/ui/runs/{run}/promises/approval-1/resolve", value='"yes"', back="/ui/approvals")
    assert "expected true or false, found 'yes'" in html.unescape(visitor.said())
    assert changes(house) == before


@pytest.mark.parametrize(
    ("of", "field"),
    [(bool, '<option value="false">no'), (int, 'type="number" step="1"'), (str, 'name="as" value="text"')],
)
def test_a_promise_form_has_a_field_of_its_type(house: House, of: Any, field: str) -> None:
    run = code_that_asks(house, "mail", value_type=of)
    for path in ("/ui/approvals", f"/ui/runs/{run}"):
        assert field in Visitor(house.app).get(path).text, path


@pytest.mark.parametrize(("act", "form"), [("resolve", {"value": "true"}), ("reject", {"reason": "no"})])
def test_a_stale_promise_form_does_not_decide_a_later_promise(house: House, act: str, form: dict[str, Any]) -> None:
    run = code_that_asks(house, "mail")
    visitor = Visitor(house.app)
    page = visitor.get("/ui/approvals").text
    (promise,) = {*re.findall(r'name="promise" value="([^"]+)"', page)}
    with house.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE orchestrator.promises SET id = gen_random_uuid()")
    before = changes(house)
    visitor.post(f"/ui/runs/{run}/promises/approval-1/{act}", back="/ui/approvals", promise=promise, **form)
    assert "It is already decided" in visitor.said()
    assert changes(house) == before


@pytest.mark.parametrize(("act", "form"), [("resolve", {"value": "true"}), ("reject", {"reason": "no"})])
def test_without_a_scheduler_a_decided_promise_is_reported_as_stored(
    house: House, monkeypatch: pytest.MonkeyPatch, act: str, form: dict[str, Any]
) -> None:
    monkeypatch.setattr(code_requests, "_LEADER_CHECK_INTERVAL", 0.1)
    run = code_that_asks(house, "mail")
    visitor = Visitor(house.app)
    visitor.get("/ui/approvals")
    visitor.post(f"/ui/runs/{run}/promises/approval-1/{act}", back="/ui/approvals", **form)
    assert "is stored" in (said := visitor.said())
    assert "no scheduler leads" in said
    with house.engine.connect() as connection:
        kinds = connection.exec_driver_sql("SELECT kind FROM orchestrator.inbox").scalars().all()
    assert [kind.split(" ")[0] for kind in kinds] == [act]


@pytest.mark.parametrize("act", ["resolve", "reject"])
def test_without_a_scheduler_clients_learn_that_the_answer_is_stored(
    house: House, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Formerly the call waited for a scheduler."""
    monkeypatch.setattr(code_requests, "_LEADER_CHECK_INTERVAL", 0.1)
    app = Orchestrator(house.settings)
    handle = app.workflow_run(code_that_asks(house, "mail"))
    said: list[str] = []

    def settle() -> None:
        with pytest.raises(ResultTimeout) as raised:
            getattr(handle, act)("approval-1", "no")
        said.append(str(raised.value))

    thread = Thread(target=settle, daemon=True)
    thread.start()
    thread.join(20)
    assert [("is stored" in one, "no scheduler leads" in one) for one in said] == [(True, True)]
    app.close()


def test_concurrent_calls_decide_a_promise_once_and_audit_it(house: House) -> None:
    run = code_that_asks(house, "mail", promises=2)
    said: list[str] = []

    def decide(promise: str, value: int) -> None:
        backend = Backend(house.settings)
        try:
            next(backend.code.resolve(run.bytes, promise, encode_value(value, "", 1_000)))
            said.append("it is stored, and waited for")
        except WrongState as error:
            said.append(str(error))
        finally:
            backend.close()

    threads = [Thread(target=decide, args=("approval-1", value)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("it was resolved with" in one for one in said) == [False, True, True], said
    decide("approval-2", 3)
    decide("one-that-comes-later", 4)
    assert said[3:] == ["it is stored, and waited for"] * 2, "another name is another promise"
    with house.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox").scalar_one() == 3
        names = connection.exec_driver_sql(
            "SELECT detail->>'name' FROM orchestrator.audit WHERE target = %s ORDER BY id", (str(run),)
        )
        assert names.scalars().all() == ["approval-1", "approval-2", "one-that-comes-later"]


def test_a_client_that_disconnects_early_causes_no_error(house: House, caplog: pytest.LogCaptureFixture) -> None:
    run = code_that_asks(house, "mail")
    visitor = Visitor(house.app)
    visitor.get("/ui/approvals")
    form = urlencode({"token": visitor.token(), "value": "true"}).encode()
    cookies = "; ".join(f"{name}={value}" for name, value in visitor.cookies.items())
    path = f"/ui/runs/{run}/promises/approval-1/resolve"
    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.replace(" ", "%20").encode(),
        "query_string": b"",
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 40_000),
        "headers": [
            (b"host", b"localhost"),
            (b"origin", b"http://localhost"),
            (b"sec-fetch-site", b"same-origin"),
            (b"cookie", cookies.encode()),
        ],
    }
    heard: list[dict[str, Any]] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": form, "more_body": False},
    ]
    answers: list[Any] = []

    async def receive() -> dict[str, Any]:
        return heard.pop() if len(heard) > 1 else heard[0]

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(house.app(scope, receive, send))
    with house.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox").scalar_one() == 1
    assert answers == []
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_approval_pages_respect_scopes_and_key_restrictions(house: House) -> None:
    own, others = flow_that_asks(house, "mail"), flow_that_asks(house, "bank")
    code_that_asks(house, "bank")
    reader = log_in(house, Scope.READ)
    for path in ("/ui/approvals", f"/ui/runs/{own}", "/ui/flows", "/ui/flows/mail-asks"):
        forms = re.findall(r'<form method="post" action="([^"]*)"', reader.get(path).text)
        assert [one for one in forms if one != "/ui/logout"] == [], path
    assert reader.post(f"/ui/runs/{own}/approve", node="ask").status_code == 403
    bound = log_in(house, Scope.OPERATE, "mail-")
    for path in ("/ui/approvals", "/ui/flows"):
        assert "bank" not in bound.get(path).text
    assert bound.get("/ui/flows/bank-asks").status_code == 403
    assert bound.get(f"/ui/runs/{others}").status_code == 404
    assert bound.post(f"/ui/runs/{others}/approve", node="ask").status_code in (303, 404)
    with house.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox").scalar_one() == 0


def test_the_page_of_a_flow_run_shows_its_current_node_and_path(house: House) -> None:
    run = flow_that_asks(house, "mail")
    visitor = Visitor(house.app)
    page = visitor.get(f"/ui/runs/{run}").text
    assert "customer of mail" in page
    assert re.search(r'class="node s-open[^>]*data-key="node-ask"', page)
    assert re.search(r'class="node s-success[^>]*data-key="node-again"', page)
    assert len(re.findall(r'class="edge [^"]*done', page)) == 1, "the line from the timer back to the question"
    assert page.count(">Approve<") == 1
    assert "Start over" not in page


def test_a_flow_is_drawn_with_its_versions(house: House) -> None:
    flow_that_asks(house, "mail")
    visitor = Visitor(house.app)
    assert 'href="/ui/flows/mail-asks"' in visitor.get("/ui/flows").text
    page = visitor.get("/ui/flows/mail-asks").text
    assert ">approved</text>" in page
    assert "flow is" not in page
    assert visitor.get("/ui/workflows/mail-asks").headers["Location"] == "/ui/flows/mail-asks"
    assert visitor.get("/ui/flows/mail-asks?version=77").status_code == 404
    visitor.post("/ui/flows/mail-asks/runs", params='{"amount": 1}')
    assert visitor.said() == "The run was started: this is the new run."


def test_a_flow_with_cycles_is_drawn() -> None:
    nodes: dict[str, Any] = {name: {"service": "s"} for name in "abc"} | {
        "d": {"kind": "subflow", "subflow": FLOW_WITH_APPROVAL}
    }
    edges = [{"from": name, "action": to, "to": to} for name in "abcd" for to in "abcd"]
    flow = msgspec.convert({"start": "a", "nodes": nodes, "edges": edges}, Flow)
    (_, whole), (path, inner) = graphs(flow, {})
    assert (len(whole.nodes), len(whole.edges), path) == (4, 16, "d")
    assert len({(node.x, node.y) for node in whole.nodes}) == 4
    assert {edge.label for edge in inner.edges} == {"approved", "rejected", ""}
