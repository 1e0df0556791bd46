"""Python client calls with an API key that is limited to some queues and workflows."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args
from uuid import UUID

import msgspec
import pytest

from orchestrator.api.dashboard.paths import PAGES
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.routes import ROUTES
from orchestrator.domain.access import Scope
from orchestrator.domain.code.history import RunStarted, RunWanted, SignalReceived, UpdateRequested
from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.executors.registry import call_of
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.domain.tasks.task import NewTask, TaskOptions, UniqueKey, executor_of, own_key, parse_options
from orchestrator.executors import Rq
from orchestrator.sdk.code.messages import request_id
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.values.payload import encode_call
from orchestrator.store.code.keys import Sent
from orchestrator.store.tasks import enqueue
from tests.integration.api_house import OTHERS, House, changes, definition, furnished

CALLS = [one for one in ROUTES if one.path.startswith(("/api/v1/client/", "/api/v1/waits"))]
PLAIN: dict[str, Any] = {
    "again": False,
    "after": 0,
    "before": None,
    "concurrency": None,
    "count": 1,
    "decision": "approved",
    "graph": {"start": "a", "nodes": {"a": {"service": "s"}}},
    "data": {"cron": "0 6 * * *"},
    "definitions": [],
    "digits": "0",
    "end": None,
    "entry": "1-0",
    "event": "e",
    "failed": None,
    "from_step": None,
    "generation": None,
    "id": "m-1",
    "keys": [],
    "kind": "task",
    "limit": 1,
    "most": 1,
    "of_code": [],
    "on_conflict": "reject",
    "origin": "o",
    "params": {},
    "paused": True,
    "payload": base64.b64encode(encode_call("a", [], {}, 1_000)).decode(),
    "pinned": False,
    "position": 0,
    "promise": "p",
    "prune": False,
    "queues": [],
    "rate": None,
    "reason": "r",
    "seconds": 1.0,
    "shown": [],
    "signal": None,
    "since": "2026-01-01T00:00:00Z",
    "start": "2026-01-01",
    "step": "s",
    "success": None,
    "text": "bank",
    "timeout": 1.0,
    "to": 1,
    "value": base64.b64encode(b"\xc0").decode(),
    "version": 1,
    "what": "update",
    "workflow": "bank-flow",
    "workflows": [],
}
"""Field values that belong to no key scope, except `workflow`."""


@pytest.fixture(scope="module")
def house(database_url: str, redis_url: str) -> Iterator[House]:
    with furnished(database_url, redis_url) as found:
        whole, drawn = found.make_key(None, None), {"definition": PLAIN["graph"]}
        for name in ("mail-drawn", "bank-drawn"):
            assert found.send("POST", f"/api/v1/flows/{name}", whole, json=drawn).is_success
        yield found


def data(identifier: UUID | bytes) -> str:
    return base64.b64encode(identifier if isinstance(identifier, bytes) else identifier.bytes).decode()


def body(call: Endpoint, house: House) -> dict[str, Any]:
    """Return the body of a call outside the key scope."""
    part = call.path.split("/")[-2]
    task = call_by_name(house.settings, "t.a", [], {}, options={"queue": OTHERS}, queue="default")
    started = RunStarted("bank-code", 1, encode_call("a", [], {}, 1_000), "mail.out")
    given = PLAIN | {
        "definition": definitions.from_data(definition("bank-flow", OTHERS)),
        "event_id": data(new_id()),
        "key": "bank-flow/default" if part == "schedules" else None if "start" in call.path else "k",
        "name": {"queues": OTHERS, "workflows": "bank-flow"}.get(part, "a"),
        "new": data(new_id()),
        "number": house.backfills["bank"],
        "run": str(house.runs["bank"]) if part == "insights" else data(house.runs["bank"]),
        "request": data(new_id()),
        "run_id": data(new_id()),
        "signals": [(data(house.runs["bank"]), data(b"\xc0"))],
        "runs": [data(house.runs["bank"])],
        "sent": Sent(house.runs["bank"].bytes, new_id(), 1),
        "started": started,
        "tags": "[]" if part == "code" else [],
        "target": CodeTarget(version=1, queue="mail.out") if part == "schedules" else data(house.tasks["bank"]),
        "task": task if call.path.endswith("enqueue") else data(house.tasks["bank"]),
        "tasks": [task],
        "text": "bank",
        "wanted": {"queue": OTHERS} if "retry" in call.path else {},
    }
    if call.path.endswith("log"):
        given["after"] = "0-0"
    elif call.path.endswith("schedules/page"):
        given["after"] = None
    if "failures" in call.path:
        given |= {"queue": OTHERS, "kind": "E", "act": "acknowledge"}
    if part == "insights":
        given["task"] = str(house.tasks["bank"])
    if call.path.endswith("waits"):
        given |= {"tasks": [data(house.tasks["bank"])], "runs": [data(house.runs["bank"])], "code": []}
    return {field.name: given[field.name] for field in msgspec.structs.fields(call.body) if field.name in given}


def is_a_list(call: Endpoint) -> bool:
    return call.about is WITHIN


LISTS = [call for call in CALLS if is_a_list(call)]
MINE = {"wanted": {}, "text": "mail-flow", "kind": "run", "digits": "0", "most": 10, "limit": 10}
"""Field values with which both keys get results."""
EMPTY = {"open_runs", "sample_runs", "count_open_others", "list_code_workflows", "runs_under", "enough_of_ids", "runs"}
"""Calls without results here."""


@pytest.mark.parametrize("call", LISTS, ids=lambda call: call.path)
def test_lists_show_only_objects_in_the_key_scope(house: House, call: Endpoint) -> None:
    found = {}
    for key in (house.key, house.make_key(None, None)):
        asked = body(call, house) | {name: MINE[name] for name in body(call, house).keys() & MINE}
        answer = house.send("POST", call.path, key, content=msgspec.json.encode(asked))
        assert answer.status_code == 200, answer.text
        found[key] = answer.text
    bound, whole = found.values()
    if call.path.rpartition("/")[2] in EMPTY:
        return
    assert "mail" in bound or str(house.runs["mail"]) in bound, bound
    for beside in ("bank", *map(str, (house.tasks["bank"], house.failed["bank"], house.runs["bank"]))):
        assert beside not in bound
    if "search" not in call.path:
        assert "bank" in whole or str(house.runs["bank"]) in whole, whole


def test_a_key_lists_the_runs_of_its_own_flows(house: House) -> None:
    whole = house.make_key(None, None)
    for name in ("mail-drawn", "bank-drawn"):
        assert house.send("POST", f"/api/v1/flows/{name}/runs", whole, json={}).status_code == 201
    call = {"workflow": None, "state": None, "limit": 10}
    answer = house.send("POST", "/api/v1/client/flows/runs", content=msgspec.json.encode(call))
    assert [one[1] for one in answer.json()["result"]] == ["mail-drawn"]
    (run,) = house.get("/api/v1/flows/mail-drawn/runs")["items"]
    assert (run["flow"], run["version"], run["status"]) == ("mail-drawn", 1, "pending")
    assert house.get(f"/api/v1/runs/{run['id']}/flow") == run
    columns = "run_id, number, node, kind, status, attempt, action, first_call, calls, started_at, ended_at"
    with house.engine.connect() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO orchestrator.node_runs ({columns}) SELECT %s, n, 'a', 'choice', 'success', 1, 'go', 0, 0,"
            " now(), now() FROM generate_series(1, 3) AS n",
            (run["id"],),
        )
    first = house.get(f"/api/v1/runs/{run['id']}/nodes?limit=2")
    assert ([one["number"] for one in first["items"]], first["next"]) == ([1, 2], 2)
    rest = house.get(f"/tasks/runs?task_id={run['id']}&after=2")
    assert [(one["visit"], one["id"]) for one in rest] == [(3, f"{run['id']}-3-1")]
    assert house.get(f"/api/v1/runs/{run['id']}/nodes?after=3") == {"items": [], "next": None}


def test_a_scoped_key_is_shown_unabbreviated_ids(house: House) -> None:
    call = {"kind": "task", "shown": [str(house.tasks["mail"])]}
    answer = house.send("POST", "/api/v1/client/insights/enough_of_ids", content=msgspec.json.encode(call))
    assert answer.json()["result"] == 36


@pytest.mark.parametrize("call", [call for call in CALLS if not is_a_list(call)], ids=lambda call: call.path)
def test_objects_outside_the_key_scope_are_rejected(house: House, call: Endpoint) -> None:
    before = changes(house)
    answer = house.send("POST", call.path, content=msgspec.json.encode(body(call, house)))
    assert answer.status_code in (403, 404), answer.text
    assert changes(house) == before


@pytest.mark.parametrize("call", [call for call in CALLS if call.scope == Scope.READ], ids=lambda call: call.path)
def test_the_same_calls_are_allowed_for_an_unscoped_key(house: House, call: Endpoint) -> None:
    """With an unscoped key, the same call passes authorization and validation."""
    whole = house.make_key(None, None)
    answer = house.send("POST", call.path, whole, content=msgspec.json.encode(body(call, house)))
    assert answer.status_code not in (400, 401, 403, 422), answer.text


def stored(house: House, task: bytes) -> tuple[ExecutorCall | None, list[ExecutorCall | None], TaskOptions]:
    """Return the stored executor of a task, those of its callbacks, and the task's options."""
    with house.engine.connect() as connection:
        query = "SELECT options::text, callbacks::text FROM orchestrator.tasks WHERE id = %s"
        options, callbacks = connection.exec_driver_sql(query, (UUID(bytes=task),)).one()
    follow = [one for each in _followers(callbacks) for one in (each, *_followers(each.callbacks))]
    return executor_of(options), [executor_of(one.options) for one in follow], parse_options(options)


def _followers(text: str | None) -> tuple[Callback, ...]:
    if text is None:
        return ()
    found = msgspec.json.decode(text, type=Callbacks)
    return (*found.success, *found.failure)


@pytest.mark.parametrize(
    ("call", "queues"),
    [
        ("tasks/enqueue", None),
        ("tasks/enqueue", "mail."),
        ("tasks/enqueue_many", None),
        ("tasks/enqueue_many", "mail."),
        ("runs/start", None),
    ],
)
def test_an_enqueue_key_cannot_choose_an_executor(house: House, call: str, queues: str | None) -> None:
    """An executor may be any command or function. Keys that apply workflows may name one, too."""
    brought = call_of(Rq(function="subprocess:getoutput"))
    options = msgspec.json.encode(TaskOptions(timeout=7.0, executor=brought)).decode()
    alone = msgspec.json.encode(TaskOptions(executor=brought)).decode()
    last = Callbacks("b", failure=(Callback("c", "mail.out", options=alone),))
    follower = Callback("b", "mail.out", options=alone, callbacks=msgspec.json.encode(last).decode())
    callbacks = msgspec.json.encode(Callbacks("a", success=(follower,))).decode()
    found = {}
    for scope in (Scope.ENQUEUE, Scope.OPERATE):
        key = house.make_key(queues, None, scope)
        run = new_id() if call == "runs/start" else None
        task = NewTask(
            new_id(), "mine.rq", "mail.out", encode_call("a", [], {}, 1_000), options=options, callbacks=callbacks,
            run_id=run, position=None if run is None else 0,
        )  # fmt: skip
        given: dict[str, Any] = {"task": task} if call == "tasks/enqueue" else {"tasks": [task]}
        if run is not None:
            given |= {"run_id": data(run), "name": "many"}
        answer = house.send("POST", f"/api/v1/client/{call}", key, content=msgspec.json.encode(given))
        assert answer.is_success, answer.text
        found[scope] = stored(house, task.id)
    assert found[Scope.ENQUEUE] == (None, [None, None], TaskOptions(timeout=7.0))
    assert found[Scope.OPERATE] == (brought, [brought, brought], TaskOptions(timeout=7.0, executor=brought))


def test_an_enqueue_key_may_signal_only_runs_that_it_starts(house: House) -> None:
    started = RunStarted("mail-code", 1, encode_call("a", [], {}, 1_000), "mail.out")
    signal = SignalReceived("approval", b"\xc0")

    def start(scope: Scope) -> tuple[int, str, int]:
        """Return the response's status and text, and the number of pending signals."""
        given = PLAIN | {"run_id": data(new_id()), "started": started, "tags": "[]", "key": "vip", "signal": signal}
        wanted = {name: given[name] for name in ("run_id", "started", "timeout", "tags", "key", "signal", "pinned")}
        call = msgspec.json.encode(wanted | {"on_conflict": "return"})
        answer = house.send("POST", "/api/v1/client/code/start", house.make_key(None, None, scope), content=call)
        with house.engine.connect() as connection:
            query = "SELECT count(*) FROM orchestrator.inbox WHERE kind = 'signal'"
            return answer.status_code, answer.text, connection.exec_driver_sql(query).scalar_one()

    status, text, before = start(Scope.ENQUEUE)
    assert status == 200, text
    status, text, signals = start(Scope.ENQUEUE)
    assert (status, signals) == (403, before), text
    assert "existing run needs the scope operate" in text
    status, text, signals = start(Scope.OPERATE)
    assert (status, signals) == (200, before + 1), text


NUMBERS = (str(2**70), "-1", "1e999", "NaN", "x")
CURSORS = ("x", "-1", str(2**70), "AAAA", "\x00", "0" * 5_000, "[]", base64.b64encode(b"\xff" * 40).decode())
IS_CURSOR = {"cursor", "after", "before", "position"}


def kinds(hint: Any) -> Iterator[Any]:
    """Yield a type hint and all its parts."""
    yield hint
    for part in get_args(hint):
        yield from kinds(part)


def hostile(struct: Any) -> Iterator[tuple[str, str]]:
    """Yield the query or body fields that hold numbers or cursors, with hostile values."""
    for field in msgspec.structs.fields(struct) if isinstance(struct, type) else ():
        known = set(kinds(field.type))
        for value in NUMBERS if known & {int, float} else CURSORS if field.encode_name in IS_CURSOR else ():
            yield field.encode_name, value


NAMES = {"/api/v1/schedules", "/ui/schedules", "/api/v1/client/schedules/page"}
"""Endpoints whose cursor is a name to begin after: any text is valid."""
BELOW_ZERO = {"priority", "position", "seconds"}
"""Numbers that may be negative: priorities, positions, and the minimum age of a transaction."""


def test_every_endpoint_rejects_hostile_numbers_and_cursors(house: House) -> None:
    whole, words = house.make_key(None, None), {"name": "mail-flow", "workflow": "mail-flow", "number": 1}
    required = {"text": "a", "task_id": str(house.runs["mail"]), "start": "2026-01-01"}
    asked = 0

    def check_rejected(endpoint: Endpoint, name: str, value: str, **sent: Any) -> None:
        ids = {"id": house.runs["mail"] if "/runs/" in endpoint.path else house.tasks["mail"]}
        path = re.sub(r"{(\w+)(:path)?}", lambda found: str((words | ids).get(found[1], "default")), endpoint.path)
        began = time.monotonic()
        answer = house.send("HEAD" if endpoint.is_live else endpoint.method, path, whole, **sent)
        may_be = (name in BELOW_ZERO and value == "-1") or (name in IS_CURSOR and endpoint.path in NAMES)
        assert 400 <= answer.status_code < 500 or (may_be and answer.is_success), (path, name, value, answer.text)
        assert time.monotonic() - began < 5, (path, name, value)

    for endpoint in (*ROUTES, *PAGES):
        known = {field.name for field in msgspec.structs.fields(endpoint.query)} if endpoint.query else set()
        plain = {name: value for name, value in required.items() if name in known}
        for name, value in hostile(endpoint.query):
            check_rejected(endpoint, name, value, params=plain | {name: value})
            asked += 1
        if endpoint in PAGES:
            continue  # pages read forms
        given = body(endpoint, house) if endpoint in CALLS else dict(endpoint.examples[0] if endpoint.examples else {})
        for name, value in hostile(endpoint.body):
            raw = msgspec.Raw(value.encode()) if value in NUMBERS[:3] else value
            check_rejected(endpoint, name, value, content=msgspec.json.encode(given | {name: raw}))
            asked += 1
    assert asked > 600


# -- ids and keys that clients choose


def ask(house: House, path: str, key: Any, /, **arguments: Any) -> Any:
    return house.send("POST", f"/api/v1/client/{path}", key, content=msgspec.json.encode(arguments))


@pytest.mark.parametrize("kind", ["unique", "once"])
def test_a_client_cannot_take_the_unique_key_of_another_task(house: House, kind: Literal["unique", "once"]) -> None:
    key = house.make_key(None, None, Scope.ENQUEUE)
    task = NewTask(new_id(), "mine.send", "mail.out", encode_call("a", [], {}, 1_000))
    foreign = UniqueKey(own_key(kind, "bank.transfer", "k"), "running", on_duplicate="replace")
    answer = ask(house, "tasks/enqueue", key, task=msgspec.structs.replace(task, unique=foreign))
    assert answer.status_code == 422, answer.text
    assert "belongs to a different task" in answer.text
    own = UniqueKey(own_key(kind, "mine.send", "k"), "running")
    assert ask(house, "tasks/enqueue", key, task=msgspec.structs.replace(task, unique=own)).is_success


@pytest.mark.parametrize("call", ["signal", "update", "update_answer", "update_stage"])
def test_a_bound_key_sends_only_request_ids_of_messages_to_the_run(house: House, call: str) -> None:
    run, others = house.runs["mail"].bytes, house.runs["bank"].bytes
    kind = "signal" if call == "signal" else "update"
    more: dict[str, dict[str, Any]] = {
        "signal": {"name": "go", "value": data(b"\xc0")},
        "update": {"name": "add", "payload": data(encode_call("a", [], {}, 1_000)), "timeout": 0.1},
        "update_answer": {"timeout": 0.1},
        "update_stage": {},
    }
    arguments = {"run": data(run)} | more[call]
    for request, id in (
        (request_id(others, kind, "payment-7"), "payment-7"),
        (request_id(others, kind, "payment-7"), ""),
        (request_id(run, kind, "payment-7"), "payment-8"),
        (new_id(), ""),
    ):
        answer = ask(house, f"code/{call}", house.key, request=data(request), id=id, **arguments)
        assert answer.status_code == 403, answer.text
        assert "does not belong to a message to run" in answer.text
    own = data(request_id(run, kind, "payment-7"))
    assert "does not belong" not in ask(house, f"code/{call}", house.key, request=own, id="payment-7", **arguments).text


def test_an_update_sent_with_a_start_is_checked(house: House) -> None:
    started = RunStarted("mail-code", 1, encode_call("a", [], {}, 1_000), "mail.out")
    update = UpdateRequested(bytes(16), "add", encode_call("a", [], {}, 1_000))
    start: dict[str, Any] = {"timeout": None, "tags": "[]", "key": "k", "on_conflict": "return", "pinned": False}
    for wrong in (
        {"update": msgspec.structs.replace(update, name="a\0")},
        {"update": msgspec.structs.replace(update, id=b"\0")},
        {"update": msgspec.structs.replace(update, payload=b"\xc1")},
        {"started": msgspec.structs.replace(started, attributes="[1]")},
        {"run_id": data(request_id(house.runs["bank"].bytes, "signal", "payment-7"))},
        {"signal": SignalReceived("go", b"\xc0", RunWanted(new_id(), "k", "mail-code", 1, b"", "mail.out"))},
    ):
        sent = start | {"run_id": data(new_id()), "started": started, "signal": None, "update": None} | wrong
        answer = ask(house, "code/start", house.key, **sent)
        assert answer.status_code == 422, (wrong, answer.text)


def test_arguments_with_an_unknown_extension_are_rejected_and_stored_ones_are_shown(house: House) -> None:
    unknown = bytes.fromhex("9291c7047f6162636480")
    task = NewTask(new_id(), "mine.send", "mail.out", unknown)
    answer = ask(house, "tasks/enqueue", house.make_key(None, None, Scope.ENQUEUE), task=task)
    assert answer.status_code == 422, answer.text
    with house.engine.begin() as connection:
        enqueue.insert_task(connection, task)
    for page in ("/ui/tasks", f"/ui/tasks/{UUID(bytes=task.id)}", f"/api/v1/tasks/{UUID(bytes=task.id)}"):
        assert house.send("GET", page, house.make_key(None, None)).status_code == 200, page
