"""Examples of docs/executors.md that need no cluster run as written, and the page's table matches them.

The examples of rq, kubernetes, cloud_run, dask and ray run in tests/integration/test_executor_….py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import project
import pytest
from click.testing import CliRunner

from orchestrator import InvalidTask, Orchestrator, TaskCancelled, executors
from orchestrator.cli import main
from orchestrator.domain.executors.registry import IN_WORKER, all_built_in
from orchestrator.sdk.dag.definitions import loads
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.pages import FENCE, REPOSITORY
from tests.acceptance.stack import Stack, using
from tests.integration.guide import example
from tests.integration.test_serve import served
from tests.waiting import eventually

PAGE = (REPOSITORY / "docs" / "executors.md").read_text(encoding="utf-8")
OWN = "Your own executor"


def blocks(section: str, language: str) -> list[str]:
    """Return the code of one section of the page."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0] if section else PAGE.split("\n## ")[0]
    return [body for kind, body in FENCE.findall(text) if kind == language]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on `sys.path` with the page's programs and its example executor, which has an entry point."""
    folder = tmp_path_factory.mktemp("packages")
    [own], [points] = blocks(OWN, "python"), blocks(OWN, "toml")
    (folder / "hot_folder.py").write_text(own, encoding="utf-8")
    shutil.copy(REPOSITORY / "examples" / "test_hot_folder.py", folder)
    group, point = re.match(r'\[project\.entry-points\."([\w.]+)"\]\n(.*)\n', points).groups()  # type: ignore[union-attr]
    installed = folder / "hot_folder-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hot_folder\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n", encoding="utf-8")
    for name, section in (("page_process", ""), ("page_http", "http"), ("page_pull", "pull")):
        [body] = blocks(section, "python")
        (folder / f"{name}.py").write_text(body, encoding="utf-8")
    sys.path.insert(0, str(folder))
    invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def stack(
    packages: Path, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A scheduler, and a worker that allows the page's command."""
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        stack.environment["PYTHONPATH"] = os.pathsep.join(path)
        stack.scheduler()
        stack.worker("--allow-command", "/usr/bin/wc")
        yield stack


@pytest.fixture(scope="module")
def api(stack: Stack) -> str:
    return stack.api()


@pytest.fixture
def page(request: pytest.FixtureRequest, stack: Stack) -> Iterator[ModuleType]:
    """A program of the page, imported as a module; its application uses the stack."""
    module = import_module(request.param)
    with using(module.app, stack):
        yield module


def run(text: str, /, **params: Any) -> Any:
    """Run a workflow of one step; return the step's output."""
    definition = loads(text)
    project.app.workflows.apply(definition)
    [output] = project.app.workflows[definition.name].start(**params).outputs(60).values()
    return output


@pytest.mark.parametrize("page", ["page_process"], indirect=True)
def test_the_process_example_counts_words(page: ModuleType) -> None:
    assert page.count_words.enqueue("one two  three").result(60).strip() == "3"
    [workflow] = blocks("", "yaml")
    assert run(workflow, text="one two").strip() == "2"


def test_a_task_enqueued_by_name_runs_on_its_executor(stack: Stack) -> None:
    stranger = Orchestrator()

    @stranger.task(name="project.weigh")
    def stub(text: str) -> int: ...

    with pytest.raises(InvalidTask, match="no body"):
        project.weigh("abc")
    with using(stranger, stack):
        weighed = stub.enqueue("abc").result(60)
    assert weighed == project.weigh.enqueue("abc").result(60) == len('{"text":"abc","unit":"bytes"}')


_STEP = """
name: weighing
tasks:
  weighed:
    task: project.weigh
    input: {text: abc}
"""


def test_http_cli_and_workflow_calls_by_name_reach_the_executor(stack: Stack, api: str, tmp_path: Path) -> None:
    """The callers do not know the declaration. The task's body is empty and would return None."""
    weight = len('{"text":"abc","unit":"bytes"}')
    file = tmp_path / "weighing.yaml"
    file.write_text(_STEP, encoding="utf-8")

    def command(*words: str) -> Any:
        done = CliRunner(env=stack.environment).invoke(main, [*words, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    called = httpx.post(f"{api}/api/v1/tasks", json={"name": "project.weigh", "args": ["abc"]}, timeout=30)
    over_http = called.raise_for_status().json()["id"]
    by_command = command("enqueue", "project.weigh", "text=abc")["id"]
    command("workflows", "apply", str(file), "--app", "page_process:app", "--elsewhere", "project.weigh")
    run = project.app.workflows["weighing"].start()
    assert project.app.handle(over_http).result(60) == weight
    assert project.app.handle(by_command).result(60) == weight
    assert run.outputs(60) == {"weighed": weight}


@pytest.mark.parametrize("page", ["page_http"], indirect=True)
def test_the_http_example_calls_its_service(page: ModuleType, api: str) -> None:
    [workflow] = blocks("http", "yaml")
    with served("services:app", REPOSITORY / "examples", "--registry", api):
        assert page.add_up.enqueue([1.5, 2.5]).result(60) == 4
        assert run(workflow) == 6


@pytest.mark.parametrize("page", ["page_pull"], indirect=True)
def test_the_pull_example_polls_and_completes_work(page: ModuleType, api: str) -> None:
    counted = page.count_words.enqueue("one two")
    with httpx.Client(base_url=f"{api}/queue", timeout=30) as client:
        work = client.post("/poll", json={"worker_id": "w", "services": ["count"]}).json()
        assert work["input"] == {"text": "one two"}
        handed_in = {"queue_id": work["queue_id"], "result": 2}
        client.post("/complete", json=handed_in).raise_for_status()
        assert counted.result(60) == 2
        began = time.monotonic()
        client.post("/complete", json=handed_in).raise_for_status()
        assert time.monotonic() - began < 4.5, "who repeats it does not wait until the work is cleared away"


def test_the_example_executor_submits_and_cancels_work(
    stack: Stack, packages: Path, tmp_path: Path
) -> None:  # `stack` runs the work
    kind: Any = import_module("hot_folder").HotFolder
    work = project.work.options(executor=kind(path=str(tmp_path)))

    def requests() -> list[Path]:
        return list(tmp_path.glob("*.request"))

    done = work.enqueue(page=7)
    eventually(requests, "it is asked for")
    [request] = requests()
    assert json.loads(request.read_bytes()) == {"page": 7}
    request.with_suffix(".new").write_text('{"result": {"text": "grüße"}}', encoding="utf-8")
    request.with_suffix(".new").rename(request.with_suffix(".answer"))
    assert done.result(60) == {"text": "grüße"}
    eventually(lambda: not list(tmp_path.iterdir()), "it is cleared away")
    unwanted = work.enqueue(page=8)
    eventually(requests, "it is asked for")
    unwanted.cancel()
    with pytest.raises(TaskCancelled):
        unwanted.result(60)
    eventually(lambda: not list(tmp_path.iterdir()), "it is ended")


def test_the_example_executor_has_at_most_forty_lines() -> None:
    [own] = blocks(OWN, "python")
    assert len([line for line in own.splitlines() if line.strip()]) <= 40


def test_the_executor_table_matches_the_examples() -> None:
    """Each executor option in the table is in an example of the page, which a test runs."""
    table = PAGE.partition("| Executor |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| \[?`(\w+)`(?:\]\((\S+)\))? \| .* \| `(.+)` \|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == {*all_built_in(), IN_WORKER}
    for name, link, shown in rows:
        if name == IN_WORKER:
            continue
        assert link == f"#{name}"
        if PAGE.count(shown) == 1:  # the example is YAML and has more options
            options, on_page = (
                eval(shown, {one: getattr(executors, one) for one in executors.__all__}),
                example(name)[0],
            )  # `eval` of our own page
            said, more = msgspec.to_builtins(options), msgspec.to_builtins(on_page)
            assert said == {key: more[key] if f"{key}=" in shown else said[key] for key in said}


@pytest.mark.long
def test_the_conformance_suite_accepts_the_example_executor(stack: Stack, packages: Path) -> None:
    some = "succeeds or killed"  # the whole suite takes a minute
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_hot_folder.py", "-k", some]
    done = subprocess.run(command, cwd=packages, env=stack.environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-5_000:]
    assert "2 passed" in done.stdout
