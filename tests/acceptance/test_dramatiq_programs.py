"""Dramatiq programs run with only their imports changed, on real schedulers and workers."""

from __future__ import annotations

from pathlib import Path

import dramatiq_shop as shop
import pytest

import orchestrator.compat.dramatiq as dramatiq
from orchestrator.compat.dramatiq import app
from orchestrator.compat.dramatiq.results import ResultFailure, ResultMissing, ResultTimeout
from orchestrator.errors import InvalidTask
from tests.acceptance.stack import HERE, Stack
from tests.waiting import eventually

application = app


@pytest.fixture(scope="module", autouse=True)
def worker(leading: Stack) -> None:
    words = ["worker", "--app", "dramatiq_shop", "--queues", "*", "--processes", "1"]
    process = leading._start("worker", words, HERE)
    eventually(lambda: process.logged("process.ready"), f"worker ready, see {process.log}")


def test_actors_are_sent_and_called() -> None:
    message = shop.add.send(1, 2)
    assert message.get_result(block=True) == 3
    assert dramatiq.Message("default", "add", (), {}, {}, message_id=message.message_id).get_result() == 3
    assert shop.add(3, 4) == 7
    assert shop.text.send_with_options(args=("a",), delay=100).get_result(block=True, timeout=20_000) == "a"


def test_actor_options_become_task_options() -> None:
    options = app.tasks["text"]._call_options
    assert (options.queue, options.priority, options.timeout_seconds) == ("mail", -10, 20)
    retries = app.tasks["add"]._call_options.policy
    assert (retries.max, retries.base, retries.cap) == (20, 15, 7 * 86_400)
    one = shop.flaky.message_with_options(max_retries=1, max_age=5_000).task()._call_options
    assert (one.policy.max, one.policy.base, one.policy.cap, one.expires) == (1, 0.01, 0.05, 5)


def test_failures_are_retried_and_raised_to_the_caller(tmp_path: Path) -> None:
    assert shop.flaky.send(str(tmp_path), 2).get_result(block=True, timeout=30_000) == 3
    (tmp_path / "tries").unlink()
    with pytest.raises(ResultFailure, match="try 1") as caught:
        shop.flaky.send(str(tmp_path), 9, "KeyError").get_result(block=True, timeout=30_000)
    assert caught.value.orig_exc_type == "KeyError"
    assert (tmp_path / "tries").read_text() == "x"
    assert shop.later.send(str(tmp_path)).get_result(block=True, timeout=30_000) == "now"


@pytest.mark.parametrize("delay", [10, None])
def test_retries_that_an_actor_asks_for_are_counted(tmp_path: Path, delay: float | None) -> None:
    with pytest.raises(ResultFailure, match="again"):
        shop.never.send(str(tmp_path), delay).get_result(block=True, timeout=20_000)
    assert (tmp_path / "runs").read_text() == "xxx"


def test_a_result_that_is_not_ready_is_missing_or_times_out(tmp_path: Path) -> None:
    message = shop.hold.send(str(tmp_path))
    with pytest.raises(ResultMissing):
        message.get_result()
    with pytest.raises(ResultTimeout):
        message.get_result(block=True, timeout=10)
    (tmp_path / "go").touch()
    assert message.get_result(block=True, timeout=30_000) == "held"


def test_a_pipeline_passes_each_result_as_the_last_argument() -> None:
    pipe = shop.add.message(1, 2) | shop.add.message(10) | shop.text.message("sum", "is")
    assert pipe.run().get_result(block=True, timeout=30_000) == "sum is 13"
    assert pipe.completed
    ignoring = dramatiq.pipeline(
        [shop.add.message(1, 2), shop.text.message_with_options(args=("alone",), pipe_ignore=True)]
    )
    assert ignoring.run().get_result(block=True, timeout=30_000) == "alone"


def test_a_group_has_results_and_callbacks(tmp_path: Path) -> None:
    both = dramatiq.group([shop.add.message(1, 2), shop.add.message(3, 4) | shop.add.message(5)]).run()
    assert list(both.get_results(block=True, timeout=30_000)) == [3, 12]
    told = dramatiq.group([shop.add.message(1, 2), shop.add.message(3, 4)])
    told.add_completion_callback(shop.touch.message(str(tmp_path / "done")))
    told.run().wait(timeout=30_000)
    assert (tmp_path / "done").exists()


def test_uncovered_features_raise_errors_that_name_them() -> None:
    with pytest.raises(ImportError, match="there is no broker"):
        dramatiq.set_broker  # noqa: B018
    with pytest.raises(InvalidTask, match="retry_when"):
        dramatiq.actor(retry_when=print)(print)
    with pytest.raises(InvalidTask, match="on_failure"):
        shop.add.send_with_options(args=(1, 2), on_failure="x")
    with pytest.raises(ValueError, match="already registered"):
        dramatiq.actor(actor_name="add")(lambda: None)
