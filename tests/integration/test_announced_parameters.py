"""Task parameters: workers announce them, the leader stores them, and dashboard pages name arguments and check calls by
them."""

from __future__ import annotations

import html
import json
import re

from orchestrator import WorkflowContext
from orchestrator.api.app import create_app
from orchestrator.domain.redaction import HIDDEN
from orchestrator.sdk.tasks.parameters import announced_parameters
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values.payload import decode_call
from orchestrator.store.fleet import parameters_of
from orchestrator.transport.codec import encode
from orchestrator.workers.parent.beating import _REPUBLISH_INTERVAL, Heartbeats
from orchestrator.workers.parent.child import Child
from tests.integration.stage import System
from tests.integration.visitor import Visitor


def old(number: int) -> None: ...
def new(number: int, times: int = 2, *, label: str = "none") -> None: ...


OLD, NEW = (encode(announced_parameters([("job", Signature("job", one), ())])) for one in (old, new))


def names(system: System, task: str = "job") -> list[str] | None:
    with system.engine.connect() as connection:
        found = parameters_of(connection, task)
    return None if found is None else [one.name for one in found]


def test_the_leader_stores_announced_parameters(system: System) -> None:
    first = system.worker("w1")
    system.pass_seconds()
    assert names(system) is None
    first.parameters = OLD
    first.beat()
    system.pass_seconds()
    assert names(system) == ["number"]
    second = system.worker("w2")
    second.parameters = NEW
    second.beat()
    system.pass_seconds()
    assert names(system) == ["number", "times", "label"]
    system.pass_seconds(2)
    assert names(system) == ["number", "times", "label"], "the old worker lives, and announces nothing new"
    for worker in (first, second):
        worker.leave()
    system.pass_seconds()
    system.worker("w3").parameters = OLD
    system.workers[-1].beat()
    system.pass_seconds()
    assert names(system) == ["number"], "the release was rolled back"


def test_each_leader_stores_announced_parameters_once(system: System) -> None:
    worker = system.worker("w1")
    worker.parameters = NEW
    worker.beat()
    system.pass_seconds()
    system.sql("DELETE FROM orchestrator.task_parameters")
    system.pass_seconds()
    assert names(system) is None, "they are stored once"
    system.lead()
    system.pass_seconds()
    assert names(system) == ["number", "times", "label"], "another leader stores them again"


def test_unreadable_announced_parameters_are_ignored(system: System) -> None:
    worker = system.worker("w1")
    worker.parameters = encode({"job": [{"name": "a\0b"}]})
    worker.beat()
    system.pass_seconds()
    assert names(system) is None
    handle = system.job.enqueue(1)
    system.pass_seconds()
    assert system.states(handle) == ["dispatched"], "and nothing else is hurt"


def announce_parameters(system: System, body: bytes) -> None:
    worker = system.worker("w1")
    worker.parameters = body
    worker.beat()
    system.pass_seconds()


def test_pages_name_arguments_and_reject_mismatched_calls(system: System) -> None:
    announce_parameters(system, NEW)
    task = system.job.enqueue(7)
    visitor = Visitor(create_app(system.settings))
    shown = html.unescape(visitor.get(f"/ui/tasks/{task.id}").text).partition("<h2>Arguments")[2]
    assert '"number": 7' in shown
    form = html.unescape(visitor.get(f"/ui/tasks/{task.id}/again").text)
    assert "JSON" not in form.partition("<main")[2], "a field for each parameter is enough"
    assert re.search(
        r'type="number" step="1" data-param="number" data-kind="integer" data-json="7" required [^>]*value="7"', form
    )
    assert re.search(r'type="number" step="1" data-param="times" data-kind="integer" placeholder="2" value=""', form)
    assert re.search(r'type="text" data-param="label" data-kind="string" placeholder=""none"" value=""', form)
    before = system.count("tasks")
    for named, said in (
        ({}, "missing a required argument: 'number'"),
        ({"number": 1, "lable": "x"}, "got an unexpected keyword argument 'lable'"),
        ({"number": 1, "label": f"{HIDDEN}x"}, "'label' is partly hidden"),
    ):
        answer = visitor.post(f"/ui/tasks/{task.id}/again", named=json.dumps(named))
        assert answer.status_code == 422
        page = html.unescape(answer.text)
        assert said in page.partition('class="said bad"')[2].partition("</p>")[0]
        assert not named or 'data-json="1"' in page or json.dumps(named) in page, "what was typed"
    for given, field, said in (
        ({"args": "[1, 2, 3]", "kwargs": "{}"}, "args", "too many positional arguments"),
        ({"args": "[]", "kwargs": "{}"}, "args", "missing a required argument: 'number'"),
        ({"args": "[1]", "kwargs": '{"lable": "x"}'}, "kwargs", "got an unexpected keyword argument 'lable'"),
        ({"args": "[", "kwargs": "{}"}, "args", "expected a JSON list"),
    ):
        answer = visitor.post(f"/ui/tasks/{task.id}/again", args=given["args"], kwargs=given["kwargs"])
        assert answer.status_code == 422
        page = html.unescape(answer.text)
        assert f'aria-invalid="true" aria-describedby="wrong-{field}"' in page
        assert said in page.partition(f'id="wrong-{field}">')[2].partition("</p>")[0]
        assert given[field] in page, "what was typed"
    assert system.count("tasks") == before
    assert visitor.post(f"/ui/tasks/{task.id}/again", args="[1, 2]", kwargs='{"label": "x"}').status_code == 303
    answer = visitor.post(f"/ui/tasks/{task.id}/again", named='{"label": "x", "number": 9007199254740993}')
    assert answer.status_code == 303
    assert system.count("tasks") == before + 2
    new = answer.headers["Location"].rpartition("/")[2]
    payload = system.row(new)["payload"]
    assert decode_call(bytes(payload))[:2] == [[9007199254740993], {"label": "x"}], "by position what was so before"


def test_the_start_form_of_a_code_workflow_shows_its_parameters(system: System) -> None:
    @system.app.workflow(name="order")
    async def order(ctx: WorkflowContext, customer: str, amount: int = 3) -> None: ...

    worker = system.worker("w1", knows=("job", "order", "order@1"))
    worker.parameters = encode(announced_parameters([("order", order._signature, ())]))
    worker.beat()
    system.pass_seconds()
    page = html.unescape(Visitor(create_app(system.settings)).get("/ui/workflows/order").text)
    assert 'data-param="customer" data-kind="string" placeholder=""' in page
    assert 'data-param="amount" data-kind="integer" placeholder="3"' in page


class Streams:
    """Records published parameters."""

    def __init__(self) -> None:
        self.published: list[bytes] = []

    def beat(self, *_: object) -> None: ...

    def shards_of_leader(self) -> None: ...

    def publish_parameters(self, body: bytes) -> None:
        self.published.append(body)


def test_a_worker_publishes_parameters_once_per_interval(system: System) -> None:
    streams = Streams()
    beating = Heartbeats(streams, None, system.settings)  # type: ignore[arg-type]
    children = []
    for parameters in (NEW, NEW, OLD, b""):
        child = Child.__new__(Child)
        child.names, child.parameters = ["job"], parameters
        child.heartbeat = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        child.doubtful = True
        children.append(child)
    for second in range(3):
        beating.send(children, None, float(second))
    assert sorted(streams.published) == sorted([OLD, NEW])
    beating.send(children, None, _REPUBLISH_INTERVAL + 5)
    assert sorted(streams.published) == sorted([OLD, NEW] * 2)
