"""No route or page, requested with any scope, reveals a planted secret that `redact` names."""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine
from starlette.applications import Starlette

from orchestrator import TaskContext, WorkflowContext
from orchestrator.api.app import create_app
from orchestrator.api.dashboard.paths import PAGES
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.redacting import fields_of, is_hidden, parts_of
from orchestrator.api.routes import ROUTES
from orchestrator.domain.access import Scope, Secret
from orchestrator.domain.fleet.announced import redacting
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Dispatch, Failed, Succeeded
from orchestrator.payloads.keeping import store_of
from orchestrator.sdk.code.engine import Engine as CodeEngine
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.store import keys
from orchestrator.store.code.keys import Sent
from orchestrator.transport.keys import Keys
from orchestrator.workers.functions import Allowed
from orchestrator.workers.reporting.journal import Journal
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from tests.integration.code_stage import act
from tests.integration.stage import System, Worker, fresh_system
from tests.integration.test_api_client_key_scope import PLAIN, data
from tests.integration.test_task_logs import keeping
from tests.outbox import KeptOutbox

PASSWORD, TOKEN = "planted-password-7f3a", "planted-token-91bc"
"""Secrets named by the setting `redact`, and by a task itself."""
KEY, MADE = "planted-key-55d0", "planted-made-c2e8"
"""Secrets named only by the setting, of runs whose tasks name none: run parameters, and values that arrived later."""
TOLD = "planted-told-0b7d"
"""A secret named by a task that only workers have: the API knows only what they announce."""
SAID = {"user": "eve", "password": PASSWORD, "token": TOKEN, "all": [TOKEN, PASSWORD]}
GRAPH = {
    "start": "enter",
    "nodes": {
        "enter": {
            "exec_type": "local_func",
            "func": "login",
            "prep": {"input_map": {"password": "$params.password", "token": "$params.token"}},
            "post": {"output_key": "entered"},
        },
        "use": {
            "exec_type": "local_func",
            "func": "use",
            "prep": {"input_map": {"secret": "$shared.entered.token", "other": "$shared.entered.password"}},
            "post": {"output_key": "used"},
        },
        "ask": {"kind": "approval", "prep": {"input_key": "$shared.entered"}, "params": {"approval_key": "$shared.ok"}},
    },
    "edges": [
        {"from": "enter", "action": "default", "to": "use"},
        {"from": "use", "action": "default", "to": "ask"},
    ],
}
DAG = """
name: onboarding
params: {password: {type: string}, token: {type: string}}
tasks:
  enter: {task: login, input: {token: "${params.token}", password: "${params.password}"}}
  use: {task: use, input: {secret: "${enter.token}", other: "Basic ${enter.password}"}, depends_on: [enter]}
  each: {task: use, foreach: "enter.all", input: {secret: "${item}"}, depends_on: [enter]}
  below: {workflow: below, input: {secret: "${use.session}", other: "${enter.password}"}, depends_on: [use, enter]}
"""
BELOW = """
name: below
params: {secret: {type: string}, other: {type: string}}
tasks: {last: {task: use, input: {secret: "${params.secret}", other: "${params.other}"}}}
"""
ALONE = """
name: alone
params: {apikey: {type: string}}
tasks:
  make: {task: make}
  last: {task: echo, input: {result: "${make.url} ${params.apikey}"}, depends_on: [make]}
"""
BREAKING = """
name: breaking
params: {password: {type: string}, token: {type: string}}
tasks: {fails: {task: broken, input: {token: "${params.token}", password: "${params.password}"}}}
"""
LONELY = {
    "start": "enter",
    "nodes": {
        "enter": {
            "exec_type": "local_func",
            "func": "echo",
            "prep": {"input_map": {"result": "$params.apikey"}},
            "post": {"output_key": "got"},
        }
    },
    "edges": [],
}
ENROLLING = {
    "name": "enrolling",
    "params": {"pin": {"type": "string"}},
    "tasks": {
        "enter": {"task": "enrol", "input": {"token": "${params.pin}"}},
        "last": {"task": "echo", "input": {"result": "${enter.copy}"}, "depends_on": ["enter"]},
    },
}
ENROLLED = {
    "start": "enter",
    "nodes": {
        "enter": {
            "exec_type": "local_func",
            "func": "enrol",
            "prep": {"input_map": {"token": "$params.pin"}},
            "post": {"output_key": "got"},
        },
        "last": {
            "exec_type": "local_func",
            "func": "echo",
            "prep": {"input_map": {"result": "$shared.got.copy"}},
            "post": {"output_key": "last"},
        },
    },
    "edges": [{"from": "enter", "action": "default", "to": "last"}],
}
RENAMED = {"session": TOKEN, "note": f"for {PASSWORD}"}
"""Results of tasks that have no `redact` option."""
ENTERED = {"token": TOLD, "copy": f"is {TOLD}"}


KNOWN = (
    redacting("enrol", ["token", "@1"]),
    "enrol",
    "login",
    "relay",
    "last",
    "use",
    "echo",
    "make",
    "broken",
    "signup",
    "under",
    "lone",
)
SHOWN_AS_THEY_ARE = {
    # ids
    *("CodeStartAnswer.result", "WorkflowsStartAnswer.result", "FlowsStartAnswer.result", "TasksEnqueueAnswer.result"),
    *(
        "TasksEnqueueManyAnswer.result",
        "CodeSignalManyAnswer.result",
        "CodeReachedAnswer.result",
        "CodeFindAnswer.result",
        "CodeRequestOfAnswer.result",
        "CodeKnownAnswer.result",
        "CodeRun.id",
    ),
    *("Sent.run", "Sent.otherwise", "Subject.key", "WorkflowsComposeAnswer.result"),
    # definitions, options, counts of workers, and data for operators: as docs/security.md says
    *("WorkflowAnswer.definition", "FlowAnswer.definition", "Definition.schedule", "Param.default", "Step.input"),
    *("Step.with_", "EventTrigger.params", "Flow.schedule", "Node.params", "Node.options", "Exec.params"),
    *("Exec.options", "ChoiceCase.expr", "Registered.options", "TaskAnswer.options"),
    *("ErrorView.data", "RunView.stuck", "MessageView.body", "SetAside.body", "ApprovalView.schema"),
    # derived from redacted values
    *("TaskAnswer.args", "TaskAnswer.kwargs", "TaskAnswer.result", "Arguments.args", "Arguments.kwargs"),
    *("CodeAnswer.args", "CodeAnswer.kwargs", "CodeAnswer.result", "CodeAnswer.state", "Outputs.outputs"),
    *("FlowRun.params", "FlowRun.shared", "FlowTask.params", "FlowTask.shared", "NodeRun.input", "NodeRun.output"),
    "ApprovalView.input",
}


class Planted:
    """A system with a secret wherever a program can leave one, and an API key of each scope."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.app = create_app(system.settings)
        self.keys = {scope: self._key(scope) for scope in Scope}
        program = system.app
        last = program.task(name="last")(_last)
        relay = program.task(name="relay", on_success=last)(_last)
        program.task(name="use")(_use)
        program.task(name="echo")(_last)
        program.task(name="make")(_make)
        program.task(name="broken", redact=("token",))(_broken)
        lone = program.workflow(name="lone")(_lone)
        self._login = program.task(name="login", redact=("token",), on_success=relay)(_login)
        signup = program.workflow(name="signup")(_signup)
        program.workflow(name="under")(_under)
        self.code = CodeEngine(program.code_workflows.find, 1_000_000)
        self._worker: Worker = system.worker(knows=KNOWN, slots=100)
        system.settle()
        program.workflows.apply(loads(BELOW))
        program.workflows.apply(loads(DAG))
        program.workflows.apply(loads(ALONE))
        program.workflows.apply(loads(BREAKING))
        program.flows.publish("graph", GRAPH)
        program.flows.publish("lonely", LONELY)
        given = {"user": "eve", "password": PASSWORD, "token": TOKEN}
        task = self._login.enqueue(**given)
        large = self._login.enqueue(**given | {"user": "large"})
        stored = self._login.enqueue(**given, filler="x" * 2_000)
        run = program.workflows["onboarding"].start(password=PASSWORD, token=TOKEN)
        graph = program.flows["graph"].start(password=PASSWORD, token=TOKEN)
        code = signup.start(user="eve", password=PASSWORD)
        code.signal("told", {"password": PASSWORD})
        told, alone = lone.start(apikey=KEY), program.workflows["alone"].start(apikey=KEY)
        lonely = program.flows["lonely"].start(apikey=KEY)
        told.signal("told", {"apikey": MADE, "note": f"n {MADE}"})
        answer = encode_value({"x": f"is {KEY}"}, "The answer", 10_000)
        next(told._client.backend.code.resolve(told._run, "answer", answer))
        broken = program.workflows["breaking"].start(password=PASSWORD, token=TOKEN)
        called = self._by_name()
        self._work()
        graph.signal("password", PASSWORD, why="they asked")
        system.pass_seconds(2)
        derived = [str(row["id"]) for row in system.sql(_DERIVED)]
        children = [
            str(row["id"]) for row in system.sql("SELECT id FROM orchestrator.runs WHERE parent_run IS NOT NULL")
        ]
        assert (len(derived), len(children)) == (21, 2)
        derived += [str(row["id"]) for row in system.sql(_ENROLLED)]
        assert len(derived) == 21 + 4
        self.tasks, self.runs = [task.id, large.id, stored.id, *derived], [run.id, graph.id, code.id, *children]
        self.runs += [*called, lonely.id, told.id, alone.id, broken.id]
        self.asked = code.id
        """A run whose code answers a query."""
        [self.failed] = [str(row["id"]) for row in system.sql(_BROKEN)]
        self.tasks.append(self.failed)
        [self.reference] = [row["result"] for row in system.sql(_RESULT, id=large.id)]

    def _key(self, scope: Scope) -> Secret:
        secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
        with self.system.engine.begin() as connection:
            keys.add(connection, secret, str(scope), scope, None)
        return secret

    def _by_name(self) -> list[str]:
        """Call a task by name over HTTP that only workers have: alone, in a step, and in a node; return the runs."""
        for given in ({"kwargs": {"token": TOLD}}, {"args": ["eve", TOLD]}):
            self._post("/api/v1/tasks", {"name": "enrol", **given})
        self._post("/api/v1/workflows", {"definition": ENROLLING})
        self._post("/api/v1/flows/{name}", {"definition": ENROLLED}, name="enrolled")
        return [
            self._post("/api/v1/workflows/{name}/runs", {"params": {"pin": TOLD}}, name="enrolling")["id"],
            self._post("/api/v1/flows/{name}/runs", {"params": {"pin": TOLD}}, name="enrolled")["id"],
        ]

    def _post(self, path: str, body: dict[str, Any], **names: str) -> Any:
        [endpoint] = [one for one in ROUTES if (one.method, one.path) == ("POST", path)]
        answers = Answers(self.app, self.keys[Scope.OPERATE])
        status, text = asyncio.run(answers.ask(endpoint, path.format(**names), "", msgspec.json.encode(body)))
        assert status < 300, text
        return msgspec.json.decode(text)

    def _work(self) -> None:
        """Let the worker run all tasks until the run of the DAG has ended."""
        for _ in range(20):
            self.system.pass_seconds()
            for one in self._worker.take():
                self._worker.report(act(self.code, one) if one.is_turn_task else self._done(one))
        rows = self.system.sql("SELECT status, count(*) FROM orchestrator.runs GROUP BY status ORDER BY status")
        assert [tuple(row.values()) for row in rows] == [("failed", 1), ("running", 2), ("success", 8)]

    def answer(self) -> None:
        """Let the leader and the worker handle requests to workflow code."""
        self.system.pass_seconds()
        self._worker.report(*(act(self.code, one) for one in self._worker.take()))
        self.system.pass_seconds()

    def _fail(self, task: Dispatch) -> AttemptReport:
        """Run a failing task like a worker, and store its log lines."""
        words = Journal(self.system.redis, Keys())
        words._started = True  # no background writer
        outbox: Any = KeptOutbox()
        outbox.log = words.log
        job = Job(task, Bundle("g", "default", "1-0", 1), 0, 0.0)
        job.begin(0.0)
        report = Runner(self.system.app, outbox, Allowed(self.system.app, ())).run(job)
        assert isinstance(report, Failed)
        words.flush()
        keeping(self.system).store()
        return report

    def _done(self, task: Dispatch) -> AttemptReport:
        if task.name == "broken":
            return self._fail(task)
        store = store_of(self.system.settings)
        assert store is not None
        echoed = {"out": " ".join(f"k={one}" for one in (KEY, MADE, TOLD) if one.encode() in task.payload)}
        other = {"make": {"apikey": MADE, "url": f"k={MADE}"}, "echo": echoed, "enrol": ENTERED}.get(task.name, RENAMED)
        value: Any = [SAID] * 100 if b"large" in task.payload else SAID if task.name == "login" else other
        result = store.result(encode_value(value, "it", 1_000_000), task.id, None, task.attempt)
        return Succeeded(task.id, task.attempt, 0.01, result)


_DERIVED = "SELECT id FROM orchestrator.ended_tasks WHERE name IN ('relay', 'last', 'use', 'echo', 'make') ORDER BY seq"
_BROKEN = "SELECT id FROM orchestrator.ended_tasks WHERE name = 'broken'"
_ENROLLED = "SELECT id FROM orchestrator.ended_tasks WHERE name = 'enrol' ORDER BY seq"
_RESULT = "SELECT result FROM orchestrator.ended_tasks WHERE id = CAST(:id AS uuid)"


def _login(user: str = "", password: str = "", token: str = "", filler: str = "") -> dict[str, Any]:
    raise NotImplementedError


def _last(result: Any) -> dict[str, str]:
    raise NotImplementedError


def _use(secret: str, other: str = "") -> dict[str, str]:
    raise NotImplementedError


def _broken(ctx: TaskContext, password: str, token: str) -> None:
    ctx.log(f"enters with {password} and {token}")
    raise ValueError(f"{password} is not that of {token}")


def _make() -> dict[str, str]:
    raise NotImplementedError


async def _lone(ctx: WorkflowContext, apikey: str) -> dict[str, Any]:
    ctx.set("ak", f"k={apikey}")
    answer = await ctx.promise("answer")
    ctx.set("said", answer["x"])
    told = await ctx.signals("told").get()
    return {"v": answer, "note": told["note"], "echoed": await ctx.schedule("echo", result=told["note"])}


async def _signup(ctx: WorkflowContext, user: str, password: str) -> None:
    @ctx.query
    def entered_as() -> dict[str, str]:
        return {"user": user, "password": password, "session": entered["token"], "note": f"for {password}"}

    ctx.set("password", password)
    ctx.set_attributes(password=password, known=f"as {password}", user=user)
    ctx.set("known", {"password": password, "user": user})
    entered = await ctx.schedule("login", user=user, password=password, token=TOKEN)
    ctx.set("session", entered["token"])
    used = await ctx.schedule("use", secret=entered["token"], other=f"for {password}")
    ctx.set("used", [used["note"], await ctx.run("bake", lambda: {"cookie": used["session"]})])
    await ctx.schedule("under", secret=entered["token"], other=password)
    await ctx.promise("confirmed")


async def _under(ctx: WorkflowContext, secret: str, other: str) -> dict[str, str]:
    ctx.set("session", secret)
    await ctx.schedule("use", secret=secret, other=other)
    return {"session": secret, "note": other}


@pytest.fixture(scope="module")
def planted(
    engine: Engine, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planted]:
    folder: Path = tmp_path_factory.mktemp("store")
    more = {"redact": "password,apikey", "payload_store": str(folder), "inline_payload": 1_000}
    with fresh_system(engine, database_url, redis_url, **more) as system:
        found = Planted(system)
        yield found
        found.code.close()
        system.sql("DELETE FROM orchestrator.api_keys")


class Answers:
    """Calls an application without a server."""

    def __init__(self, app: Starlette, key: Secret) -> None:
        self._app = app
        self._headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]

    async def ask(self, endpoint: Endpoint, path: str, query: str, body: bytes) -> tuple[int, str]:
        """Return the status and body of a response; of an endless body, the beginning."""
        status, text, sent, begun = 0, b"", [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Any) -> None:
            nonlocal status, text
            status = message.get("status", status)
            text += message.get("body", b"")
            if text:
                begun.set()

        scope = {
            "type": "http",
            "method": endpoint.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [*self._headers, (b"content-length", str(len(body)).encode())],
            "client": ("127.0.0.1", 1),
            "scheme": "http",
            "http_version": "1.1",
        }
        asked = asyncio.ensure_future(self._app(scope, receive, send))
        if endpoint.is_live:
            begins = asyncio.ensure_future(begun.wait())
            await asyncio.wait((asked, begins), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(asked, 20)
        return status, text.decode()


def _required(endpoint: Endpoint) -> set[str]:
    """Return the required query parameters."""
    fields = () if endpoint.query is None else msgspec.structs.fields(endpoint.query)
    return {"id" if one.name == "task_id" else one.name for one in fields if one.required}


def route_values(planted: Planted, endpoint: Endpoint) -> Iterator[dict[str, str]]:
    """Yield values for the path and query parameters of a route."""
    if "{name}" not in endpoint.path or "{id}" in endpoint.path:
        ids = planted.tasks if "/tasks/{" in endpoint.path else planted.runs
        for id in ids if "{id}" in endpoint.path or "id" in _required(endpoint) else ids[:1]:
            yield {"id": id, "name": "enter", "task_id": id, "flow_id": "graph", "text": "login", "number": "1"}
    else:
        yield from ({"name": name, "workflow": name} for name in ("onboarding", "graph"))


def called(planted: Planted, endpoint: Endpoint, id: str, kind: str) -> bytes:
    """Return the request body of the Python client for a task or a run."""
    part, identifier = endpoint.path.split("/")[-2], id if "/insights/" in endpoint.path else data(UUID(id))
    given = PLAIN | {
        "key": "onboarding/default" if part == "schedules" else None,
        "name": "onboarding" if part == "workflows" else "graph" if part == "flows" else "enter",
        "number": 0,
        "reference": data(bytes(planted.reference)) if id == planted.tasks[1] else "",
        "sent": Sent(UUID(id).bytes, new_id(), 1),
        "run": identifier,
        "task": identifier,
        "target": identifier,
        "runs": [identifier] if kind == "run" else [],
        "tasks": [identifier] if kind == "task" else [],
        "code": [],
        "timeout": 0.0,
        "wanted": {},
        "workflow": "graph",
    }
    if endpoint.path.endswith("log"):
        given["after"] = "0-0"
    fields = [field.name for field in msgspec.structs.fields(endpoint.body)]
    return msgspec.json.encode({name: given[name] for name in fields if name in given})


def requests(planted: Planted, endpoint: Endpoint) -> Iterator[tuple[str, str, bytes]]:
    """Yield the path, query and body of requests to a route for everything that was planted."""
    if endpoint.is_for_sdk:
        fields = {field.name for field in msgspec.structs.fields(endpoint.body)}
        tasks = planted.tasks if fields & {"task", "target", "tasks"} else ()
        runs = planted.runs if fields & {"run", "runs"} else planted.runs[:1]
        for kind, ids in (("task", tasks), ("run", runs)):
            yield from ((endpoint.path, "", called(planted, endpoint, id, kind)) for id in ids)
        return
    if endpoint.path == "/ui/compare":
        for two in pairwise(planted.runs):
            yield endpoint.path, urlencode([("run", run) for run in two]), b""
    for place in route_values(planted, endpoint):
        path = re.sub(r"{(\w+)}", lambda found: place.get(found[1], "x"), endpoint.path)  # noqa: B023
        known = () if endpoint.query is None else msgspec.structs.fields(endpoint.query)
        wanted = {one.name: place[one.name] for one in known if one.required and one.name in place}
        yield path, urlencode(wanted), b"{}"


def has_secret(endpoint: Endpoint, text: str) -> bool:
    """Return whether a response reveals a planted secret; for SDK routes, also in encoded data."""
    encoded = re.findall(r'"([A-Za-z0-9+/]{8,}={0,2})"', text) if endpoint.is_for_sdk else ()
    told = [text.encode(), *(base64.b64decode(one) for one in encoded if len(one) % 4 == 0)]
    return any(secret.encode() in one for secret in (PASSWORD, TOKEN, KEY, MADE, TOLD) for one in told)


ASKS_CODE = {f"/api/v1/client/code/{name}" for name in ("query", "update", "resolve", "reject", "reset")}
"""Routes that only a worker or a leader can answer."""
LOOKS = [
    one
    for one in (*ROUTES, *PAGES)
    if one.scope is not None
    and (one.method == "GET" or (one.is_for_sdk and (one.scope is Scope.READ or one.true_values)))
    and one.path not in ASKS_CODE
]


NOT_THERE = re.compile(
    r"schedules/|backfill|quarantine|anything|runs_under|code/find|version|update_|allocate|ui/(tasks|queues|workers)/|reset|name}/logs"
)
"""Routes of things that do not exist here, or that need more than an id."""


@pytest.mark.parametrize("scope", list(Scope))
def test_no_route_reveals_a_secret(planted: Planted, scope: Scope) -> None:
    """Only programs with the scope `enqueue` get true values, from the few routes declared to return them."""
    answers, looked, telling = Answers(planted.app, planted.keys[scope]), set(), set()

    def is_sampled(endpoint: Endpoint) -> bool:
        """A higher scope sees what lower scopes see, so its test requests only a few of the planted objects."""
        if scope is Scope.ENQUEUE:
            return endpoint.scope is Scope.READ and not endpoint.true_values
        return scope in (Scope.OPERATE, Scope.ADMIN) and endpoint.scope in (Scope.READ, Scope.ENQUEUE)

    async def ask_all() -> None:
        for endpoint in LOOKS:
            step = 5 if is_sampled(endpoint) else 1
            for path, query, body in islice(requests(planted, endpoint), None, None, step):
                status, text = await answers.ask(endpoint, path, query, body)
                if status == 200:
                    looked.add(endpoint.path)
                if has_secret(endpoint, text):
                    telling.add(endpoint.path)

    asyncio.run(ask_all())
    may_see = scope.includes(Scope.ENQUEUE)
    true = {one.path for one in LOOKS if one.true_values and may_see and one.scope and scope.includes(one.scope)}
    assert telling <= true, telling - true
    sampled = {one.path for one in LOOKS if is_sampled(one)}
    silent = {path for path in true - telling if not NOT_THERE.search(path)}
    assert silent <= sampled, silent
    missed = {one.path for one in LOOKS if one.scope is not None and scope.includes(one.scope)} - looked - sampled
    assert [path for path in sorted(missed) if not NOT_THERE.search(path)] == []


def test_an_api_without_settings_redacts_by_the_settings_of_the_program(planted: Planted) -> None:
    """Patterns are stored with tasks, definitions and flows, but not with workflow code, which has no stored
    options."""
    app = create_app(replace(planted.system.settings, redact=""))
    answers = Answers(app, planted.keys[Scope.READ])
    told: set[str] = set()
    of_code = "SELECT id FROM orchestrator.runs WHERE code UNION SELECT id FROM orchestrator.ended_tasks WHERE id IN "
    of_code += "(SELECT id FROM orchestrator.runs WHERE code)"
    beside = {str(row["id"]) for row in planted.system.sql(of_code)}
    pages = [one for one in LOOKS if "{id}" in one.path and not one.is_for_sdk and one.scope is Scope.READ]

    async def ask_all() -> None:
        for endpoint in pages:
            for path, query, body in requests(planted, endpoint):
                if not beside & {*path.split("/")}:
                    _, text = await answers.ask(endpoint, path, query, body)
                    told.update({path} if has_secret(endpoint, text) else ())

    asyncio.run(ask_all())
    assert told == set()


QUERIES = [one for one in ROUTES if one.path in ("/api/v1/runs/{id}/queries/{name}", "/api/v1/client/code/query")]


@pytest.mark.parametrize("scope", list(Scope))
def test_no_query_of_workflow_code_reveals_a_secret(planted: Planted, scope: Scope) -> None:
    answers, told = Answers(planted.app, planted.keys[scope]), {}
    payload = data(encode_call("entered_as", [], {}, 1_000))
    body = {"run": data(UUID(planted.asked)), "name": "entered_as", "payload": payload, "timeout": 10.0}

    async def ask(endpoint: Endpoint) -> tuple[int, str]:
        path = endpoint.path.format(id=planted.asked, name="entered_as")
        sent = msgspec.json.encode(body if endpoint.is_for_sdk else {"timeout": 10.0})
        asked = asyncio.ensure_future(answers.ask(endpoint, path, "", sent))
        while not asked.done():
            await asyncio.to_thread(planted.answer)
        return asked.result()

    for endpoint in QUERIES:
        status, text = asyncio.run(ask(endpoint))
        assert status == 200, text
        told[endpoint.is_for_sdk] = has_secret(endpoint, text)
        assert "eve" in text or endpoint.is_for_sdk
    assert told == {False: False, True: scope is not Scope.READ}


def test_values_that_are_not_secret_are_shown(planted: Planted) -> None:
    """Only secret values are redacted, also within values derived from them."""
    answers = Answers(planted.app, planted.keys[Scope.READ])
    [show] = [one for one in ROUTES if (one.method, one.path) == ("GET", "/api/v1/tasks/{id}")]

    async def ask(id: str) -> Any:
        return msgspec.json.decode((await answers.ask(show, f"/api/v1/tasks/{id}", "", b""))[1])

    found = [asyncio.run(ask(id)) for id in planted.tasks]
    hidden = "•••"
    relays = [one["args"] for one in found if one["task"]["name"] == "relay"]
    assert {"user": "eve", "password": hidden, "token": hidden, "all": [hidden, hidden]} in [one[0] for one in relays]
    used = [one["kwargs"] for one in found if one["task"]["step"] == "use"]
    assert {"secret": hidden, "other": hidden}.items() <= used[0].items()
    assert {"session": hidden, "note": f"for {hidden}"} in [one["result"] for one in found]
    [error] = [one["error"] for one in found if one["task"]["id"] == planted.failed]
    assert error["message"] == f"{hidden} is not that of {hidden}"
    [logs] = [one for one in ROUTES if (one.method, one.path) == ("GET", "/api/v1/tasks/{id}/logs")]
    text = asyncio.run(answers.ask(logs, f"/api/v1/tasks/{planted.failed}/logs", "", b""))[1]
    assert f"enters with {hidden} and {hidden}" in text


def values_in(hint: Any, path: str = "", seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """Yield the fields of a type that accept any value and do not declare their redaction."""
    for kind in parts_of(hint):
        if kind in (Any, object, bytes, dict, list, msgspec.Raw):
            yield path
        if not is_hidden(kind) and kind not in seen:
            for name, inner in fields_of(kind).items():
                yield from values_in(inner, f"{kind.__name__}.{name}", seen | {kind})


def test_every_response_type_with_free_values_declares_its_redaction() -> None:
    found = {place for one in ROUTES if not one.true_values for place in values_in(one.answer)}
    assert found == SHOWN_AS_THEY_ARE
