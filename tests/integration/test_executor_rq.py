"""Tasks that run on an existing RQ fleet, with real RQ workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

pytest.importorskip("rq", reason="the extra rq is not installed")

from rq import Queue, Worker
from rq.job import Job

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.plugins.executors.rq import Rq
from orchestrator.plugins.executors.rq.driver import RqExecutor
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable
from tests.integration import executing
from tests.integration.executing import Driver, Heard, until
from tests.integration.guide import example
from tests.waiting import eventually

HERE = Path(__file__).parent


_DRIVER = Driver(lambda: RqExecutor(Setup()))
drive, run = _DRIVER.drive, _DRIVER.run


@contextmanager
def rq_worker(url: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "rq.cli", "worker", "--url", url, "--path", str(HERE), "--quiet", *more, "work"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            redis = Redis.from_url(url)
            eventually(lambda: Worker.count(connection=redis) > 0 or process.poll(), "a worker of RQ")
            redis.close()
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def fleet(redis_url: str) -> Iterator[str]:
    """The Redis URL of a running RQ worker."""
    with rq_worker(redis_url):
        yield redis_url


def execution(function: str, *arguments: Any, url: str, timeout: float | None = 60.0, **options: Any) -> Execution:
    asked = Rq(**{"function": f"rq_jobs:{function}", "queue": "work", "url": url, **options})
    return executing.execution(asked, *arguments, queue="default", timeout=timeout)


@pytest.mark.parametrize("serializer", ["pickle", "json"])
def test_a_job_submitted_repeatedly_runs_once(redis_url: str, tmp_path: Path, serializer: str) -> None:
    asked = execution("double", 4, url=redis_url, serializer=serializer, queue=serializer)

    async def steps(executor: RqExecutor) -> Outcome:
        names = await asyncio.gather(*(executor.submit(asked) for _ in range(5)))
        assert set(names) == {asked.name}
        redis = Redis.from_url(redis_url)
        assert Queue(serializer, connection=redis).job_ids == [asked.name]
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rq.cli", "worker", "--url", redis_url, "--path", str(HERE), "--quiet", "--burst"),
            *("--serializer", f"rq.serializers.{'JSON' if serializer == 'json' else 'Default'}Serializer", serializer),
        )
        outcome = await executor.watch(asked, asked.name, Heard())
        assert await worker.wait() == 0
        await executor.submit(asked)
        assert Queue(serializer, connection=redis).job_ids == []
        await executor.expire(asked, asked.name)
        left = list(redis.scan_iter(f"*{asked.name}*"))
        assert {0 < redis.ttl(key) <= 60 for key in left} == {True}, "it goes in a minute, if nobody deletes it"
        await executor.release(asked, asked.name)
        assert not list(redis.scan_iter(f"*{asked.name}*"))
        redis.close()
        return outcome

    assert drive(steps) == Finished({"doubled": 8})


def test_a_failure_contains_the_remote_type_message_and_traceback(fleet: str) -> None:
    outcome = run(execution("fail", "no: such\nthing", url=fleet))

    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.message, outcome.retryable) == ("ValueError", "no: such\nthing", True)
    assert "rq_jobs.py" in outcome.detail


def test_a_result_beyond_plain_data_is_not_unpickled(fleet: str) -> None:
    outcome = run(execution("odd", url=fleet))

    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.retryable) == ("UnreadableOutput", False)
    assert "pathlib.PosixPath" in outcome.message


@pytest.mark.parametrize(("function", "number"), [("talk", 20), ("talk", 3), ("talk_later", 4)])
def test_printed_lines_are_logged_if_requested(fleet: str, function: str, number: int) -> None:
    heard = Heard()
    outcome = run(execution(function, number, url=fleet, prints=True), heard)

    assert heard.lines == [f"info: line {line}" for line in range(number)]
    if number == 3:
        assert isinstance(outcome, Broken)
        assert (outcome.kind, outcome.message) == ("ValueError", "three")
    else:
        assert outcome == Finished(number)


def test_a_large_result_arrives_complete(fleet: str) -> None:
    assert run(execution("large", 5_000_000, url=fleet)) == Finished("x" * 5_000_000)


def test_a_job_reports_progress_to_successive_watchers(fleet: str, tmp_path: Path) -> None:
    asked, heard = execution("tell", str(tmp_path), url=fleet), Heard()

    async def first(executor: RqExecutor) -> None:
        name = await executor.submit(asked)
        watching = asyncio.create_task(executor.watch(asked, name, heard))
        await until(lambda: heard.marks)
        watching.cancel()

    async def second(executor: RqExecutor) -> Outcome:
        name = await executor.submit(asked)
        (tmp_path / "go").touch()
        return await executor.watch(asked, name, heard)

    drive(first)
    assert drive(second) == Finished("held")
    assert heard.marks[0] == (3.0, 10.0, "a third")
    assert (tmp_path / "ran").read_text() == "x"


def test_a_cancel_stops_a_running_job(fleet: str, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path), url=fleet)

    async def steps(executor: RqExecutor) -> Outcome:
        name = await executor.submit(asked)
        await until((tmp_path / "began").exists)
        await executor.cancel(asked, name)
        horse = int((tmp_path / "pid").read_text().split()[0])
        with pytest.raises(ProcessLookupError):
            os.kill(horse, 0)
        await executor.cancel(asked, name)
        return await executor.watch(asked, name, Heard())

    outcome = drive(steps)
    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.retryable) == ("JobStopped", False)


def test_a_worker_gets_one_stop_command_while_it_has_the_job(redis_url: str) -> None:
    """On a stop command, RQ kills the worker's current job, which may be another job by then."""
    asked, redis = execution("double", 1, url=redis_url, queue="nobody"), Redis.from_url(redis_url)
    told = redis.pubsub()  # type: ignore[no-untyped-call]
    told.subscribe("rq:pubsub:w1")
    assert told.get_message(timeout=10)["type"] == "subscribe"

    def commands() -> list[Any]:
        return list(iter(lambda: told.get_message(timeout=0.1), None))

    async def look_twice(executor: RqExecutor) -> None:
        for _ in range(2):
            fleet, options = executor._fleet(asked)
            await fleet.next(asked.name, options)

    async def steps(executor: RqExecutor) -> None:
        await executor.submit(asked)
        redis.hset(Job.key_for(asked.name), mapping={"status": "started", "worker_name": "w1"})
        redis.hset("rq:worker:w1", "current_job", "another")
        other = RqExecutor(Setup())
        cancelling = [asyncio.create_task(one.cancel(asked, asked.name)) for one in (executor, other)]
        await look_twice(executor)
        assert commands() == [], "it runs another job"
        redis.hset("rq:worker:w1", "current_job", asked.name)
        await look_twice(executor)
        await look_twice(other)
        assert [json.loads(command["data"])["job_id"] for command in commands()] == [asked.name]
        redis.hset(Job.key_for(asked.name), "status", "stopped")
        await asyncio.gather(*cancelling)
        await executor.release(asked, asked.name)
        assert not list(redis.scan_iter(f"*{asked.name}*"))
        await other.close()

    try:
        drive(steps)
    finally:
        redis.delete("rq:worker:w1")
        told.close()
        redis.close()


def test_a_cancel_removes_a_waiting_job_from_its_queue(redis_url: str) -> None:
    asked = execution("double", 1, url=redis_url, queue="unserved")

    async def steps(executor: RqExecutor) -> list[str]:
        await executor.cancel(asked, await executor.submit(asked))
        redis = Redis.from_url(redis_url)
        waiting = Queue("unserved", connection=redis).job_ids
        await executor.release(asked, asked.name)
        await executor.cancel(asked, asked.name)
        redis.close()
        return waiting

    assert drive(steps) == []


def test_a_killed_work_horse_is_a_retryable_failure(fleet: str, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path), url=fleet)

    async def steps(executor: RqExecutor) -> Outcome:
        name = await executor.submit(asked)
        await until((tmp_path / "began").exists)
        os.kill(int((tmp_path / "pid").read_text().split()[0]), signal.SIGKILL)
        return await executor.watch(asked, name, Heard())

    outcome = drive(steps)
    assert isinstance(outcome, Broken)
    assert outcome.retryable
    assert "signal 9" in outcome.message


def test_the_job_of_a_killed_worker_is_lost_when_its_claim_expires(redis_url: str, tmp_path: Path) -> None:
    asked = execution("hold", str(tmp_path), url=redis_url, queue="doomed")

    async def steps(executor: RqExecutor) -> Outcome:
        name = await executor.submit(asked)
        with rq_worker(redis_url, "doomed") as worker:
            await until((tmp_path / "began").exists)
            os.kill(int((tmp_path / "pid").read_text().split()[0]), signal.SIGKILL)
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        redis = Redis.from_url(redis_url)
        if Job.fetch(name, connection=redis).is_started:  # expire the claim, which lasts a minute and a half
            claims: Any = redis.zrange("rq:wip:doomed", 0, -1)
            redis.zadd("rq:wip:doomed", dict.fromkeys(claims, 1))
        redis.close()
        return await executor.watch(asked, name, Heard())

    outcome = drive(steps)
    assert isinstance(outcome, Broken)
    assert outcome.retryable
    assert outcome.kind == "WorkerLost"


def test_a_deleted_job_raises_gone(redis_url: str) -> None:
    asked = execution("double", 1, url=redis_url, queue="unserved")

    async def steps(executor: RqExecutor) -> None:
        name = await executor.submit(asked)
        redis = Redis.from_url(redis_url)
        Job.fetch(name, connection=redis).delete()
        redis.close()
        with pytest.raises(Gone, match=asked.name):
            await executor.watch(asked, name, Heard())

    drive(steps)


def test_an_unreachable_redis_is_reported_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET", "redis://:hunter2@127.0.0.1:1/0")
    asked = execution("double", 1, url="", url_variable="FLEET")

    async def steps(executor: RqExecutor) -> None:
        with pytest.raises(Unreachable, match="127.0.0.1:1") as caught:
            await executor.submit(asked)
        assert "hunter2" not in str(caught.value)

    drive(steps)


def test_a_missing_redis_url_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RQ_REDIS_URL", raising=False)

    async def steps(executor: RqExecutor) -> None:
        with pytest.raises(Unequipped, match="RQ_REDIS_URL"):
            await executor.submit(execution("double", 1, url=""))

    drive(steps)


def test_hundreds_of_jobs_are_watched_over_few_connections(redis_url: str) -> None:
    some = [execution("double", 1, url=redis_url, queue="unserved") for _ in range(500)]
    redis = Redis.from_url(redis_url)
    before = redis.info("clients")["connected_clients"]

    async def steps(executor: RqExecutor) -> int:
        names = await asyncio.gather(*(executor.submit(one) for one in some))
        watching = [
            asyncio.create_task(executor.watch(one, name, Heard())) for one, name in zip(some, names, strict=True)
        ]
        pipeline = redis.pipeline()
        for name in names:
            pipeline.hset(f"rq:job:{name}", "status", "finished")
        await asyncio.sleep(0)
        pipeline.execute()
        outcomes = await asyncio.gather(*watching)
        assert outcomes == [Finished(None)] * len(some)
        return int(redis.info("clients")["connected_clients"]) - before

    assert drive(steps) <= 4
    redis.close()


def test_the_example_of_the_guide_runs(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, input = example("rq")
    monkeypatch.setenv("RQ_REDIS_URL", redis_url)
    asked = replace(execution("double", url=redis_url), options=options, input=input)
    with rq_worker(redis_url, "numbers"):
        assert run(asked) == Finished(3)


@pytest.mark.parametrize(
    ("options", "option", "said"),
    [
        ({"function": "jobs.double"}, "function", "package.module:function"),
        ({"function": "jobs:double", "url": "redis://:hunter2@host"}, "url", "url_variable"),
        ({"function": "jobs:double", "url": "http://host"}, "url", "redis://"),
        ({"function": "jobs:double", "queue": ""}, "queue", "queue of RQ"),
        ({"function": "jobs:double", "url_variable": "a b"}, "url_variable", "variable"),
        ({"function": "jobs:double", "job_timeout": 0.0}, "job_timeout", "1 second"),
        ({"function": "jobs:double", "result_ttl": 1.0}, "result_ttl", "60 seconds"),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], option: str, said: str) -> None:
    [(name, text)] = Rq(**options).problems()

    assert name == option
    assert said in text
    assert "hunter2" not in text
