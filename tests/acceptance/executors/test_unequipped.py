"""A worker that lacks what an executor needs fails no task: tasks wait for an equipped worker, and status says why."""

from __future__ import annotations

from pathlib import Path

import project
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.executors import Kubernetes, Process, Rq
from tests.acceptance.stack import Stack
from tests.waiting import eventually

_BY_PROGRAM = """
current-context: here
contexts: [{name: here, context: {cluster: here, user: me}}]
clusters: [{name: here, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: me, user: {exec: {command: login}}}]
"""


def test_tasks_whose_executor_the_worker_cannot_use_wait_without_failing(stack: Stack, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(_BY_PROGRAM)
    stack.environment["KUBECONFIG"] = str(kubeconfig)
    stack.scheduler()
    worker = stack.worker()
    handed_back = project.work.options(executor=Kubernetes(image="any")).enqueue(do="return", id="1")
    unknown = project.work.options(executor=Rq(function="a:b", url_variable="NOBODYS")).enqueue(do="return", id="2")

    def said() -> str:
        return CliRunner(env=stack.environment).invoke(main, ["status"]).output

    eventually(lambda: "kubeconfig" in said().lower() and "NOBODYS" in said(), "status says what is missing", every=0.5)
    eventually(lambda: worker.logged("workers do not support"), "the worker says so, too")
    for handle in (handed_back, unknown):
        row = stack.sql("SELECT status, failures, hold FROM orchestrator.tasks WHERE id = :id", id=handle.id)
        assert tuple(row[0])[:2] == ("pending", 0)


def test_a_command_cannot_read_secrets_from_other_processes(stack: Stack) -> None:
    stack.environment["PLANTED"] = "hidden-words"
    stack.scheduler()
    stack.worker("--allow-command", "/bin/sh")
    project.isolated.enqueue(1).result(timeout=60)  # its process waits for more tasks
    look = (
        "grep -la hidden-words /proc/[0-9]*/environ 2>/dev/null | while read file; do cat ${file%environ}cmdline; done"
    )
    seen = project.work.options(executor=Process(command=["/bin/sh", "-c", look], output="text")).enqueue(do="look")
    assert seen.result(timeout=60) == ""
