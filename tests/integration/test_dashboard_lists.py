"""Lists of tasks and runs: filters persist, names and keys link to pages, search finds arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import pytest

from orchestrator.api import access, arguments
from orchestrator.api.app import create_app
from orchestrator.domain.access import Scope
from orchestrator.domain.code import history
from orchestrator.domain.dag.definition import Registered
from orchestrator.domain.tasks.parameters import Parameter
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.values.display import call_of
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store import fleet
from orchestrator.store.code.histories import event_rows
from orchestrator.store.insights import run_lists, show_code, tasks
from tests.emptying import empty
from tests.integration.api_house import House, furnished
from tests.integration.test_dashboard import make_key
from tests.integration.visitor import Visitor
from tests.integration.waiting_house import flow_that_asks


@pytest.fixture(scope="module")
def furniture(database_url: str, redis_url: str) -> Iterator[House]:
    with furnished(database_url, redis_url) as found:
        yield found


@pytest.fixture
def house(furniture: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(access, "_KEY_TTL", 0.0)
    with furniture.engine.connect() as connection:
        empty(connection, "api_keys", "inbox")
    return furniture


@pytest.fixture
def anyone(house: House) -> Visitor:
    return Visitor(house.app)


def execute(house: House, statement: str, *values: Any) -> None:
    with house.engine.connect() as connection:
        connection.exec_driver_sql(statement, values)


def enqueue(house: House, name: str, args: list[Any], kwargs: dict[str, Any], **options: Any) -> str:
    backend = Backend(house.settings)
    try:
        task = call_by_name(
            house.settings, name, args, kwargs, options={"queue": "mail.out"} | options, queue="default"
        )
        return str(UUID(bytes=backend.tasks.enqueue(task)))
    finally:
        backend.close()


def start_code(house: House, args: list[Any], kwargs: dict[str, Any], name: str = "mail-code") -> UUID:
    """Store a run of a workflow as code whose parameters a worker has announced."""
    run = UUID(bytes=new_id())
    start = history.RunStarted(name, 1, encode_call(name, args, kwargs, 10_000))
    ((_, number, kind, data),) = event_rows(run.bytes, [start])
    execute(
        house,
        "INSERT INTO orchestrator.runs (id, name, workflow, version, status, total, open, code)"
        " VALUES (%s, %s, %s, 1, 'running', 1, 1, true)",
        *(run.hex, name, name),
    )
    execute(
        house,
        "INSERT INTO orchestrator.histories (run_id, number, at, kind, data) VALUES (%s, %s, now(), %s, %s)",
        *(run.hex, number, kind, data),
    )
    known = [Parameter(name="customer", type="str"), Parameter(name="amount", type="int", optional=True, default=5)]
    with house.engine.connect() as connection:
        fleet.describe(connection, [{name: known}])
    return run


def listed(page: str) -> list[str]:
    return re.findall(r'<tr data-key="([^"]*)">', page)


def row_of(page: str, id: object) -> str:
    found = re.search(rf'<tr data-key="{id}">.*?</tr>', page, re.DOTALL)
    assert found, f"{id} is listed"
    return found[0]


@pytest.mark.parametrize(
    ("listing", "act"),
    [
        ("/ui/tasks?status=pending&queue=mail.out&sort=when", "/ui/tasks/cancel"),
        ("/ui/tasks?status=failed&queue=mail.out&span=24h", "/ui/tasks/retry"),
        ("/ui/failures?span=7d", "/ui/tasks/retry"),
        ("/ui/runs?status=pending&workflow=mail-flow&sort=when", "/ui/runs/cancel"),
    ],
)
def test_a_bulk_action_returns_to_the_filtered_list(anyone: Visitor, listing: str, act: str) -> None:
    link = re.search(rf'href="({act}\?[^"]*)"', anyone.get(listing).text)
    assert link, f"{listing} offers it"
    page = anyone.get(unescape(link[1])).text
    again = re.search(r'<form class="filters".*?</form>', page, re.DOTALL)
    if again:  # the form that changes the filters of the count
        fields = re.findall(r'name="([^"]*)" value="([^"]*)"', again[0])
        assert ("back", unescape(listing)) in [(name, unescape(value)) for name, value in fields]
    form = re.search(r'<form method="post".*?class="act big">(.*?)</form>', page, re.DOTALL)
    assert form
    sent: dict[str, Any] = {
        name: unescape(value) for name, value in re.findall(r'name="([^"]*)" value="([^"]*)"', form[1])
    }
    assert sent["back"] == listing
    action = act.replace("/runs/cancel", "/runs/cancel-chosen")
    assert anyone.post(action, **sent).headers["Location"] == listing
    assert f'<p class="crumbs"><a href="{listing.replace("&", "&amp;")}">' in page


def test_a_preview_links_back_only_to_dashboard_pages(anyone: Visitor) -> None:
    page = anyone.get("/ui/tasks/cancel?queue=mail.out&back=https://elsewhere.example/").text
    assert 'elsewhere.example/">Tasks' not in page
    assert '<p class="crumbs"><a href="/ui">Tasks</a>' in page


def test_lists_show_the_due_time_of_delayed_tasks(house: House, anyone: Visitor) -> None:
    id = enqueue(house, "t.late", [], {}, delay=3_900.0)
    held = enqueue(house, "t.held", [], {})
    execute(
        house, "UPDATE orchestrator.tasks SET hold = 'unknown', wake_at = now() + interval '2 days' WHERE id = %s", held
    )
    busy = enqueue(house, "t.busy", [], {})
    execute(
        house, "UPDATE orchestrator.tasks SET hold = 'crowded', wake_at = now() + interval '9 s' WHERE id = %s", busy
    )
    for path in ("/ui/tasks?status=pending", "/ui/search?text=t.late"):
        row = row_of(anyone.get(path).text, id)
        assert re.search(r'due <time datetime="(20[^"]*Z)" title="\1">in 1h</time>', row), path
    page = anyone.get("/ui/tasks?status=pending").text
    assert re.search(r"fails <time [^>]*>in 2d", row_of(page, held))
    assert not re.search("due <time|fails <time", row_of(page, busy))
    assert not re.search("due <time|fails <time", row_of(page, house.tasks["mail"]))
    assert re.search(r"<dt>Due</dt><dd><time [^>]*>in 1h", anyone.get(f"/ui/tasks/{id}").text)


def test_a_partial_name_suggests_names_that_contain_it(house: House, anyone: Visitor) -> None:
    enqueue(house, "shop.send_invoice", [], {})
    enqueue(house, "shop.void_INVOICE", [], {}, queue="bank.out")
    page = anyone.get("/ui/tasks?name=invoice&status=pending").text
    assert "No task is named “invoice”. Names that contain it:" in page
    for name in ("shop.send_invoice", "shop.void_INVOICE"):
        link = re.search(rf'<a href="([^"]*)">{name}</a>', page)
        assert link
        assert len(listed(anyone.get(unescape(link[1])).text)) == 1
    page = anyone.get("/ui/tasks?name=shop.send_invoice&status=failed").text
    assert "No task is named" not in page, "there is one in another state"
    assert (
        "No task is named “nothing-like-it”, and there is no similar name."
        in anyone.get("/ui/tasks?name=nothing-like-it").text
    )
    assert re.search(r"No queue is named “mail”.*>mail.out</a>", anyone.get("/ui/tasks?queue=mail").text)
    assert re.search(r"No workflow is named “mail”.*>mail-flow</a>", anyone.get("/ui/runs?workflow=mail").text)
    assert re.search(
        r"No workflow is named “mial-flow”. Did you mean.*>mail-flow</a>",
        anyone.get("/ui/runs?workflow=mial-flow").text,
    )
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.READ, "mail.", "mail-"))
    page = bound.get("/ui/tasks?name=invoice").text
    assert "shop.send_invoice" in page
    assert "shop.void_INVOICE" not in page
    assert "bank" not in bound.get("/ui/tasks?queue=bank").text.replace("bank”", "").replace(
        'value="bank"', ""
    ).replace("queue=bank", "")


def test_a_run_is_found_by_its_custom_id_and_its_key(house: House, anyone: Visitor) -> None:
    backend = Backend(house.settings)
    try:
        keyed = UUID(bytes=backend.workflows.start("mail-flow", {}, new_id(), key="order/7 ü", tags=()))
        twice = [backend.workflows.start(f"{one}-flow", {}, new_id(), key="both", tags=()) for one in ("mail", "bank")]
    finally:
        backend.close()
    chosen, as_uuid = UUID(bytes=new_id()), UUID(bytes=new_id())
    own = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"
    for id, key in ((chosen, "order-77"), (as_uuid, own)):
        execute(
            house,
            "INSERT INTO orchestrator.runs (id, name, total, open, workflow, code, status, ended_at)"
            " VALUES (%s, 'billing', 0, 0, 'billing', true, 'success', now())",
            id.hex,
        )
        execute(house, "INSERT INTO orchestrator.run_keys (key, run_id) VALUES (%s, %s)", f"billing/{key}", id.hex)
    for path, to in (
        ("order-77", chosen),
        ("billing%2Forder-77", chosen),
        ("order%2F7%20%C3%BC", keyed),
        (own, as_uuid),
        (str(chosen)[-12:], chosen),
    ):
        answer = anyone.get(f"/ui/runs/{path}")
        assert (answer.status_code, answer.headers.get("Location")) == (303, f"/ui/runs/{to}"), path
    assert anyone.get("/ui/runs/order-77/log?before=1-1").headers["Location"] == f"/ui/runs/{chosen}/log?before=1-1"
    assert anyone.get("/ui/runs/both").headers["Location"] == "/ui/search?text=both"
    for one in twice:
        assert str(UUID(bytes=one)) in anyone.get("/ui/search?text=both").text
    missing = anyone.get("/ui/runs/order-78")
    assert missing.status_code == 404
    assert "order-78" in missing.text
    assert str(chosen) in anyone.get("/ui/search?text=order-77").text, "though no live worker has its code"
    task = house.tasks["mail"]
    assert anyone.get(f"/ui/tasks/{str(task)[-8:]}").headers["Location"] == f"/ui/tasks/{task}"
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.READ, "mail.", "mail-"))
    assert bound.get("/ui/runs/order-77").status_code == 404
    assert bound.get("/ui/runs/both").headers["Location"] == f"/ui/runs/{UUID(bytes=twice[0])}"


def form_of(page: str, action: str) -> dict[str, Any]:
    """Return the values that a form sends if unchanged."""
    form = re.search(rf'<form method="post" action="{action}"[^>]*>(.*?)</form>', page, re.DOTALL)
    assert form, page
    sent = {
        name: unescape(value) for name, value in re.findall(r'<input [^>]*\bname="([^"]*)" value="([^"]*)"', form[1])
    }
    sent |= {
        name: unescape(text)
        for name, text in re.findall(r'<textarea name="([^"]*)"[^>]*>(.*?)</textarea>', form[1], re.DOTALL)
    }
    fields = re.findall(r'data-param="([^"]*)"[^>]*data-json="([^"]*)"', form[1])
    named = json.loads(sent["named"]) | {unescape(name): json.loads(unescape(value)) for name, value in fields}
    return sent | {"named": json.dumps(named)}


PARAMS = {
    "day": {"type": "date"},
    "amount": {"type": "number", "default": 1.5},
    "dry": {"type": "boolean", "default": False},
    "note": {"type": "string", "default": "none"},
    "token": {"type": "string", "default": ""},
}


def test_a_run_started_with_changes_has_a_form_of_its_parameters(house: House, anyone: Visitor) -> None:
    given = {"day": "2026-01-31", "amount": 20, "dry": True, "note": 'a "b"', "token": "hunter2-secret"}
    backend = Backend(house.settings)
    try:
        made = definitions.from_data({"name": "mail-daily", "params": PARAMS, "tasks": {"a": {"task": "t.a"}}})
        step = msgspec.structs.replace(made.steps[0], registered=Registered(options={"redact": ["token"]}))
        backend.workflows.apply(msgspec.structs.replace(made, steps=(step,)))
        run = UUID(bytes=backend.workflows.start("mail-daily", given, new_id(), key=None, tags=("eu",)))
        assert f'href="/ui/runs/{run}/again">Start with changes…' in anyone.get(f"/ui/runs/{run}").text
        page = anyone.get(f"/ui/runs/{run}/again").text
        assert "hunter2" not in page
        assert re.search(r'<input type="date" data-param="day"[^>]* value="2026-01-31"', page)
        assert re.search(r'<select data-param="dry".*?<option value="true" selected>', page, re.DOTALL)
        sent = form_of(page, f"/ui/runs/{run}/again")
        answer = anyone.post(
            f"/ui/runs/{run}/again", **sent | {"named": sent["named"].replace('"amount": 20', '"amount": 21')}
        )
        new = UUID(answer.headers["Location"].removeprefix("/ui/runs/"))
        found = backend.insights.show_run(new)
        assert found is not None
        assert (found.params, found.tags) == (given | {"amount": 21}, ("eu",))
        sent = form_of(anyone.get(f"/ui/runs/{run}/again").text, f"/ui/runs/{run}/again")
        answer = anyone.post(f"/ui/runs/{run}/again", **sent | {"named": '{"day": "never", "note": "kept"}'})
        assert answer.status_code == 422
        assert re.search(r'class="said bad"[^>]*>[^<]*day', answer.text)
        assert 'value="kept"' in answer.text
    finally:
        backend.close()


def test_code_runs_started_with_changes_use_parameter_names(house: House, anyone: Visitor) -> None:
    run = start_code(house, ["cust-9"], {"amount": 12})
    page = anyone.get(f"/ui/runs/{run}/again").text
    assert re.search(r'data-param="customer"[^>]* value="cust-9"', page)
    assert re.search(r'<input type="number"[^>]*data-param="amount"[^>]* value="12"', page)
    sent = form_of(page, f"/ui/runs/{run}/again")
    answer = anyone.post(f"/ui/runs/{run}/again", **sent | {"named": sent["named"].replace("12", "13")})
    new = UUID(answer.headers["Location"].removeprefix("/ui/runs/"))
    with house.engine.connect() as connection:
        found = show_code(connection, new)
    assert found is not None
    assert call_of(found.payload) == (["cust-9"], {"amount": 13})


def test_a_flow_run_can_be_started_with_changes(house: House, anyone: Visitor) -> None:
    flow_that_asks(house, "mail")
    backend = Backend(house.settings)
    try:
        run = UUID(bytes=backend.flows.start("mail-asks", {"items": [7]}, new_id()))
        sent = form_of(anyone.get(f"/ui/runs/{run}/again").text, f"/ui/runs/{run}/again")
        assert json.loads(sent["named"]) == {"items": [7]}
        answer = anyone.post(f"/ui/runs/{run}/again", **sent | {"named": '{"items": [8]}'})
        found = backend.insights.show_run(UUID(answer.headers["Location"].removeprefix("/ui/runs/")))
        assert found is not None
        assert found.params == {"items": [8]}
    finally:
        backend.close()


EXACT, WITH_THIS = "Tasks with this argument", "Tasks with this in an argument"
RUNS_WITH_THIS = ("Runs with this parameter", "Runs with this in a parameter")


def found_in(page: str, *headings: str) -> list[str]:
    sections = (page.partition(f"<h2>{heading}</h2>")[2].partition("</section>")[0] for heading in headings)
    return [id for section in sections for id in listed(section)]


def test_lists_show_arguments_of_code_runs_by_name(house: House, anyone: Visitor) -> None:
    run = start_code(house, ["cust-31"], {"amount": 1_250})
    secret = start_code(house, ["cust-32"], {})
    execute(
        house,
        "INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id, options)"
        """ VALUES (%s, 't.a', 'shared', '', %s, '{"redact": ["token"]}')""",
        *(UUID(bytes=new_id()).hex, secret.hex),
    )
    unannounced = start_code(house, ["pear"], {"amount": 3}, "mail-unannounced")
    execute(house, "DELETE FROM orchestrator.task_parameters WHERE name = 'mail-unannounced'")
    for path in ("/ui/runs", "/ui/search?text=mail-code", "/ui/workflows/mail-code"):
        page = unescape(anyone.get(path).text)
        assert 'customer="cust-31", amount=1250' in row_of(page, run), path
        assert "parameters customer" in row_of(page, secret), path
        assert "cust-32" not in page, "a task of the run hides something, and it may be this"
    assert '"pear", amount=3' in row_of(unescape(anyone.get("/ui/runs").text), unannounced)
    settings = replace(house.settings, redact="amount")
    page = Visitor(create_app(settings)).get("/ui/runs").text
    assert "parameters customer, amount" in row_of(page, run)
    assert "cust-31" not in page


def test_lists_show_parameters_of_flow_runs(house: House, anyone: Visitor) -> None:
    run = flow_that_asks(house, "mail")
    assert "amount=1100" in row_of(anyone.get("/ui/runs").text, run)
    hides = """UPDATE orchestrator.flows SET definition = jsonb_set(definition, '{functions}', %s) WHERE name = %s"""
    execute(house, hides, '{"t.a": {"options": {"redact": ["amount"]}}}', "mail-asks")
    try:
        assert "parameters amount" in row_of(anyone.get("/ui/runs").text, run), "its definition hides something"
    finally:
        execute(house, hides, "{}", "mail-asks")
    execute(
        house,
        "INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id, options)"
        """ VALUES (%s, 't.a', 'shared', '', %s, '{"redact": ["token"]}')""",
        *(UUID(bytes=new_id()).hex, run.hex),
    )
    assert "parameters amount" in row_of(anyone.get("/ui/runs").text, run), "a task of it hides something"


def test_code_runs_are_found_by_argument(house: House, anyone: Visitor) -> None:
    run = str(start_code(house, [{"lines": [{"sku": "pear-77"}]}], {"amount": 41}))
    hidden = start_code(house, ["pear-77"], {})
    execute(
        house,
        "INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id, options)"
        """ VALUES (%s, 't.a', 'shared', %s, %s, '{"redact": ["token"]}')""",
        *(UUID(bytes=new_id()).hex, encode_call("t.a", [], {"token": "pear-77"}, 1_000), hidden.hex),
    )
    for text in ("pear-77", "41", "amount=41", "customer.lines.sku=pear-77", "sku=pear-77"):
        assert found_in(anyone.get(f"/ui/search?{urlencode({'text': text})}").text, *RUNS_WITH_THIS) == [run], text
        assert listed(anyone.get(f"/ui/runs?{urlencode({'argument': text})}").text) == [run], text
    for text in ("amount=4", "customer=41", "sku=pear", "sku"):
        assert listed(anyone.get(f"/ui/runs?{urlencode({'argument': text})}").text) == [], text
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.READ, "bank.", "bank-"))
    assert listed(bound.get("/ui/runs?argument=pear-77").text) == []


def test_lists_filtered_by_argument_offer_no_bulk_actions(anyone: Visitor) -> None:
    for path in ("/ui/runs?argument=x&workflow=mail-flow", "/ui/tasks?argument=x&queue=mail.out"):
        assert not re.search("Cancel all open|Retry all failed|Delete all ended", anyone.get(path).text), path
    assert anyone.get("/ui/runs/cancel?argument=x&workflow=mail-flow").status_code == 422
    assert anyone.get("/ui/tasks/cancel?argument=x&queue=mail.out").status_code == 422


def test_tasks_are_found_by_argument_at_any_depth_and_name(house: House, anyone: Visitor) -> None:
    with house.engine.connect() as connection:
        fleet.describe(connection, [{"t.charge": [Parameter(name="customer"), Parameter(name="order")]}])
    order = {"lines": [{"sku": "plum-1", "count": 7}], "total": 12.5, "paid": True, "at": "2026-01-31"}
    task = enqueue(house, "t.charge", [42, order], {})
    enqueue(house, "t.charge", [7042, {"lines": [{"sku": "plum-10", "count": 70}]}], {"note": "for 142"})
    hidden = enqueue(house, "t.charge", [43, {"token": "plum-secret", "n": 99}], {}, redact=["token"])
    for text in (
        "customer=42",
        "order.lines.sku=plum-1",
        "sku=plum-1",
        "count=7",
        "total=12.5",
        "paid=true",
        "12.5",
        "CUSTOMER=42",
    ):
        assert listed(anyone.get(f"/ui/tasks?{urlencode({'argument': text})}").text) == [task], text
        assert found_in(anyone.get(f"/ui/search?{urlencode({'text': text})}").text, EXACT, WITH_THIS) == [task], text
    for text in ("customer=7", "token=plum-secret", "plum-secret", "lines=7", "count=700", "token"):
        assert listed(anyone.get(f"/ui/tasks?{urlencode({'argument': text})}").text) == [], text
    assert listed(anyone.get("/ui/tasks?argument=n=99").text) == [hidden]
    assert listed(anyone.get("/ui/tasks?argument=customer=42&status=success").text) == []
    assert listed(anyone.get("/ui/tasks?argument=customer=42&name=t.charge&status=pending&sort=when").text) == [task]
    bound = Visitor(house.app)
    bound.log_in(make_key(house, Scope.READ, "bank.", "bank-"))
    assert listed(bound.get("/ui/tasks?argument=customer=42").text) == []


def test_an_argument_search_that_stops_early_offers_the_next_page(
    house: House, anyone: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [enqueue(house, "t.many", [], {"customer": f"early-{number % 2}"}) for number in range(6)]
    assert "not searched" not in anyone.get("/ui/search?text=arly-0").text
    monkeypatch.setattr(arguments, "MAX_LIST_SECONDS", -1.0)
    monkeypatch.setattr(tasks, "MAX_SCANNED", 1)
    monkeypatch.setattr(run_lists, "MAX_SCANNED", 1)
    page = anyone.get("/ui/search?text=arly-0").text
    assert "Arguments of older runs were not searched" in page
    link = re.search(r"Arguments of older tasks were not searched.*?href=\"([^\"]*)\">Search older tasks", page)
    assert link
    seen, page = found_in(page, WITH_THIS), anyone.get(unescape(link[1])).text
    assert "The search stopped after one second. There may be more matches on the next page." in page
    seen += listed(page)
    while following := re.search(r'href="([^"]*)" rel="next"', page):
        page = anyone.get(unescape(following[1])).text
        seen += listed(page)
    assert seen == [made[4], made[2], made[0]]


def test_exact_matches_of_an_argument_come_first(house: House, anyone: Visitor) -> None:
    order = enqueue(house, "t.ship", [], {"order": "o-100"})
    longer = [enqueue(house, "t.ship", [], {"order": f"o-100{number}"}) for number in range(25)]
    for text in ("o-100", '"o-100"', "order=o-100", 'order="o-100"'):
        page = anyone.get(f"/ui/search?{urlencode({'text': text})}").text
        assert found_in(page, EXACT) == [order], text
        assert found_in(page, WITH_THIS) == (longer[:-21:-1] if text == "o-100" else []), text
    assert listed(anyone.get("/ui/tasks?argument=%22o-100%22").text) == [order]
    short = enqueue(house, "t.ship", [731], {"region": "eu"})
    assert found_in(anyone.get("/ui/search?text=eu").text, EXACT) == [short]
    assert found_in(anyone.get("/ui/search?text=%22731%22").text, EXACT) == [short]
