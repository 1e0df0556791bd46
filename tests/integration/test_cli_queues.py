"""`orchestrator queues` with unknown queue names, and what `status` says of paused queues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator import ResultTimeout
from orchestrator.api.context import Api
from orchestrator.api.dashboard.pages.overview import read_is_led
from orchestrator.cli import main
from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.store import fleet
from orchestrator.store.fleet import WorkerRow
from tests.integration.serving import both_ways  # noqa: F401
from tests.integration.stage import System


@pytest.fixture
def run(system: System, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.syspath_prepend(str(in_empty_folder))
    return lambda *words: CliRunner().invoke(main, ["queues", *words])


def worker(queues: list[str]) -> WorkerRow:
    return WorkerRow("w", "here", 7, queues, [], 10, 0, "live", 0.0)


@pytest.mark.parametrize(
    "words",
    [("pause",), ("resume",), ("limit", "--concurrency", "2"), ("retain", "--success", "1h"), ("purge",), ("drain",)],
)
def test_an_unknown_queue_is_rejected_with_the_nearest_name(
    system: System, run: Callable[..., Result], words: tuple[str, ...]
) -> None:
    with system.engine.begin() as connection:
        fleet.mirror(connection, [worker(["mail"])], datetime.now(UTC))
    verb, *options = words
    refused = run(verb, "mial", *options)
    assert refused.exit_code == 1
    assert "There is no queue 'mial'" in refused.output
    assert "Did you mean 'mail'?" in refused.output
    assert run(verb, "mail", *options).exit_code == 0


def test_a_future_queue_may_be_paused(run: Callable[..., Result]) -> None:
    assert run("pause", "tomorrow").exit_code == 1
    assert run("pause", "tomorrow", "--new").exit_code == 0
    assert run("drain", "tomorrow").exit_code == 0, "which has no tasks"
    assert run("resume", "tomorrow").output == "Queue tomorrow is resumed.\n"
    assert run("pause", "tomorrow").exit_code == 0, "somebody has named it by now"


def test_workflows_and_the_application_make_queue_names_known(
    system: System, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.app.workflows.apply(Definition(name="flow", queue="reports", steps=(Step(name="a", task="f.py:t"),)))
    assert run("pause", "reports").exit_code == 0
    code = "from orchestrator import Orchestrator\napp = Orchestrator(routes={'x.*': 'routed'})\n"
    (tmp_path / "routing_shop.py").write_text(code)
    assert run("pause", "routed").exit_code == 1
    monkeypatch.setenv("ORCHESTRATOR_APP", "routing_shop:app")
    assert run("pause", "routed").exit_code == 0
    assert "no task, worker, workflow or setting names it, nor does routing_shop:app." in run("pause", "rooted").output


def test_status_names_a_paused_queue_in_which_tasks_wait(system: System, run: Callable[..., Result]) -> None:
    for number in range(2):
        system.job.enqueue(number)
    assert run("pause", "default").exit_code == 0
    assert run("pause", "empty", "--new").exit_code == 0
    said = CliRunner().invoke(main, ["status"]).output
    assert "Queue 'default' is paused; 2 tasks wait in it, the oldest for " in said
    assert "Resume it: orchestrator queues resume default" in said
    assert "'empty'" not in said
    troubles = json.loads(CliRunner().invoke(main, ["status", "--json"]).output)["trouble"]
    assert [found["about"] for found in troubles if found["kind"] == "paused queue"] == ["default"]


def test_workers_of_queues_are_unknown_without_a_leader(system: System, run: Callable[..., Result]) -> None:
    with system.engine.begin() as connection:
        fleet.mirror(connection, [worker(["mail"])], datetime.now(UTC))
    assert "unknown" not in run().output.splitlines()[1]
    assert json.loads(run("--json").output)["queues"][0]["is_led"] is True
    system.expire_lease()
    assert run().output.splitlines()[1].split().count("unknown") == 2, "workers and slots"
    assert json.loads(run("--json").output)["queues"][0]["is_led"] is False


def test_workers_are_unknown_while_the_leader_cannot_read_redis(system: System, run: Callable[..., Result]) -> None:
    """The leader keeps its lease, but its data about the workers grows old."""
    mail = system.app.task(name="mail", queue="mail")(lambda: None).enqueue()
    system.tick()
    system.sql("UPDATE orchestrator.tasks SET created_at = now() - interval '1 minute'")
    with system.engine.begin() as connection:
        fleet.mirror(connection, [worker(["mail"])], datetime.now(UTC) - timedelta(minutes=1))
    assert run().output.splitlines()[1].split().count("unknown") == 2, "workers and slots"
    status = json.loads(CliRunner().invoke(main, ["status", "--json"]).output)
    assert (status["hears_workers"], status["unserved_queues"]) == (False, [])
    assert "no worker" not in {found["kind"] for found in status["trouble"]}
    assert re.search(
        "workers +unknown: the scheduler receives no heartbeats", CliRunner().invoke(main, ["status"]).output
    )
    assert "unknown while no scheduler hears them" in CliRunner().invoke(main, ["doctor"]).output
    with pytest.raises(ResultTimeout, match="The scheduler receives nothing from the workers"):
        mail.result(timeout=0.01)
    with closing(Api(system.settings)) as api:
        assert not read_is_led(api)
    with system.engine.begin() as connection:
        fleet.mirror(connection, [worker(["other"])], datetime.now(UTC))
    assert json.loads(CliRunner().invoke(main, ["status", "--json"]).output)["unserved_queues"] == ["mail"]


def test_a_purge_finds_tasks_that_bounded_counts_missed(system: System, run: Callable[..., Result]) -> None:
    system.sql(
        "INSERT INTO orchestrator.tasks (id, name, queue, payload, wake_at) "
        "SELECT gen_random_uuid(), 'job', CASE WHEN n > 25000 THEN 'late' ELSE 'default' END, '', now() + '1 day' "
        "FROM generate_series(1, 25010) AS n"
    )
    system.sql("ANALYZE orchestrator.tasks")
    assert run("pause", "late").exit_code == 0
    said = {queue["queue"]: queue for queue in json.loads(run("--json").output)["queues"]}
    assert (said["late"]["delayed"], said["late"]["least"]) == (0, ["delayed"])
    assert run("purge", "late", "--yes").output == "The scheduler cancels 10 tasks.\n"
    assert run("purge", "empty", "--yes").exit_code == 1
