"""The queues that an application or a workflow names."""

from __future__ import annotations

from orchestrator import Orchestrator, WorkflowContext
from orchestrator.domain.dag.definition import Definition, Hook, Registered, Step, named_queues


def test_the_queues_of_an_application_are_listed() -> None:
    app = Orchestrator(routes={"mail.*": "mail", "odd.*": "routed"})
    assert app.queues() == ["default", "mail", "routed"]

    @app.task(name="end")
    def end(result: str) -> None: ...

    @app.task(name="mail.send", on_success=end.options(queue="after"), on_failure=[end.options(queue="trouble")])
    def send() -> None: ...

    @app.task(queue="images")
    def resize() -> None: ...

    @app.workflow(queue="orders")
    async def order(ctx: WorkflowContext) -> None: ...

    assert app.queues() == ["default", "after", "images", "mail", "orders", "routed", "trouble"]


def test_the_queues_of_a_workflow_are_listed() -> None:
    steps = (
        Step(name="a", task="t"),
        Step(name="b", task="t", queue="own"),
        Step(name="c", task="t", registered=Registered(queue="of-task")),
    )
    hook = Hook(task="t", registered=Registered(queue="of-hook"))
    definition = Definition(name="x", queue="flow", steps=steps, on_failure=(hook,))
    assert named_queues(definition) == {"flow", "own", "of-task", "of-hook"}


def test_queues_in_which_nothing_runs_are_not_listed() -> None:
    own = Step(name="a", task="t", queue="own", registered=Registered(queue="of-task"))
    child = Step(name="b", workflow="y", queue="nothing-runs-here")
    hook = Hook(task="t", registered=Registered(queue="of-hook"))
    definition = Definition(name="x", queue="flow", steps=(own, child), on_success=(hook,))
    assert named_queues(definition) == {"own", "of-hook"}
    assert named_queues(Definition(name="x", queue="flow", steps=(own,), on_failure=(Hook(webhook="http://a"),))) == {
        "flow",
        "own",
    }
