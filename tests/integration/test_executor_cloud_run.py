"""Tasks that run as Cloud Run executions, against a fake server that validates requests by the published API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.errors import GiveUp
from orchestrator.payloads.keeping import NoStore
from orchestrator.plugins.executors.cloud_run import CloudRun
from orchestrator.plugins.executors.cloud_run import driver as cloud_run
from orchestrator.plugins.executors.cloud_run.driver import CloudRunExecutor
from orchestrator.settings import Settings
from orchestrator.workers.container import Board, Specification, folder_of
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable
from tests.integration import executing
from tests.integration.executing import Driver, Heard
from tests.integration.fake_cloud_run import FakeCloudRun
from tests.integration.guide import example
from tests.waiting import eventually

_DRIVER = Driver(lambda **settings: CloudRunExecutor(Setup(settings=Settings(**settings))))
drive, run = _DRIVER.drive, _DRIVER.run


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudRun]:
    server = FakeCloudRun()
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_RUN", f"http://{server.host}/")
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(cloud_run, "_POLL_INTERVAL", 0.05)  # 2 s in production, to spare Google's API
    yield server
    server.stop()


def variables(google: FakeCloudRun) -> dict[str, str]:
    [one] = google.executions.values()
    return {item["name"]: item["value"] for item in one["template"]["containers"][0]["env"]}


def execution(job: str, timeout: float | None = 60.0, input: dict[str, Any] | None = None, **more: Any) -> Execution:
    options = CloudRun(project="acme-prod", location="europe-west1", job=job, **more)
    return executing.execution(options, task="reports.build", input=input or {}, timeout=timeout)


def test_a_job_gets_its_input_variables_and_options(google: FakeCloudRun) -> None:
    more: dict[str, Any] = {"args": ["--full"], "env": {"REGION": "eu"}, "container": "main", "tasks": 3}
    asked, heard = execution("quick", input={"year": 2024}, **more), Heard()

    assert run(asked, heard) == Finished(None)
    said = variables(google)
    assert json.loads(said["TASK_SPEC"])["input"] == {"year": 2024}
    assert (said["REGION"], said["TASK_EXECUTION"]) == ("eu", asked.name)
    [found] = google.executions.values()
    assert found["template"]["timeout"] == "70.000s"
    assert found["taskCount"] == 3
    assert heard.lines == [f"info: The log of the execution is at {found['logUri']}"]


def test_results_and_errors_are_read_from_the_payload_store(google: FakeCloudRun, tmp_path: Path) -> None:
    good, bad, mute = (execution("holding", output="store") for _ in range(3))

    async def steps(executor: CloudRunExecutor) -> list[Outcome]:
        names = [await executor.submit(one) for one in (good, bad, mute)]
        folders = [tmp_path / "orchestrator" / "executions" / one.name for one in (good, bad, mute)]
        told = [
            variable["value"]
            for one in google.executions.values()
            for variable in one["template"]["containers"][0]["env"]
        ]
        assert {str(folder) for folder in folders} <= {*told}
        boards = [Board(folder_of(str(folder)), Specification()) for folder in folders]
        boards[0].succeed(b'{"rows": 3}')
        boards[1].fail({"kind": "GiveUp", "message": "no such month", "retryable": False, "detail": "line 3"})
        for name, succeeded in zip(names, (True, False, True), strict=True):
            google.end(name, succeeded=succeeded)
        seen = [await executor.watch(one, name, Heard()) for one, name in zip((good, bad, mute), names, strict=True)]
        for one, name in zip((good, bad, mute), names, strict=True):
            await executor.release(one, name)
        assert not any(folder.exists() for folder in folders)
        return seen

    first, second, third = drive(steps, payload_store=str(tmp_path))
    assert first == Finished({"rows": 3})
    assert second == Broken("GiveUp", "no such month", False, "line 3")
    assert isinstance(third, Broken)
    assert third.kind == "OutputLost"
    with pytest.raises(NoStore, match="payload_store"):
        run(execution("holding", output="store"))


def test_the_example_of_the_guide_runs(google: FakeCloudRun) -> None:
    options, input = example("cloud_run")
    assert run(replace(execution("report"), options=options, input=input)) == Finished(None)
    assert json.loads(variables(google)["TASK_SPEC"])["input"] == {"month": "2024-01"}


def test_a_resubmitted_execution_is_found_by_name_and_not_rerun(google: FakeCloudRun) -> None:
    asked = execution("holding")
    google.page = 2

    async def first(executor: CloudRunExecutor) -> str:
        name = await executor.submit(asked)
        await asyncio.gather(*(executor.submit(execution("holding")) for _ in range(5)))  # newer executions
        return name

    async def second(executor: CloudRunExecutor) -> Outcome:
        name = await executor.submit(asked)
        google.end(name)
        return await executor.watch(asked, name, Heard())

    drive(first)
    assert drive(second) == Finished(None)
    assert len(google.executions) == 6


def test_a_failure_contains_googles_message(google: FakeCloudRun) -> None:
    outcome = run(execution("failing"))

    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.retryable) == ("ExecutionFailed", True)
    assert outcome.message == "The execution failed: exit(1) (1 of 1 tasks failed)."
    assert "console.example" in outcome.detail


@pytest.mark.parametrize("is_known", [True, False])
def test_an_execution_is_cancelled(google: FakeCloudRun, is_known: bool) -> None:
    asked = execution("holding")

    async def steps(executor: CloudRunExecutor) -> Outcome:
        name = await executor.submit(asked)
        await executor.cancel(asked, name if is_known else "")
        await executor.cancel(asked, name)
        return await executor.watch(asked, name, Heard())

    outcome = drive(steps)
    assert isinstance(outcome, Broken)
    assert (outcome.kind, outcome.retryable) == ("ExecutionCancelled", False)
    assert len([path for _, path in google.requests if path.endswith(":cancel")]) == 1


def test_one_list_request_covers_all_executions_of_a_job(google: FakeCloudRun, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [execution("holding") for _ in range(50)]

    async def steps(executor: CloudRunExecutor) -> list[Outcome]:
        names = await asyncio.gather(*map(executor.submit, some))
        google.requests.clear()
        watching = [
            asyncio.create_task(executor.watch(one, name, Heard())) for one, name in zip(some, names, strict=True)
        ]
        await asyncio.to_thread(eventually, lambda: len(google.requests) >= 3)
        for name in names:
            google.end(name)
        outcomes = await asyncio.gather(*watching)
        assert len(google.requests) < 50
        return outcomes

    assert drive(steps) == [Finished(None)] * 50


def test_a_busy_api_is_retried_after_the_requested_delay(google: FakeCloudRun) -> None:
    google.failures = [(503, {}), (429, {"Retry-After": "0"})]
    assert run(execution("quick")) == Finished(None)
    assert google.requests[0] == google.requests[1] == google.requests[2]


def test_a_lost_response_does_not_start_a_second_execution(google: FakeCloudRun) -> None:
    asked = execution("quick")
    google.lost_answers = 1

    async def steps(executor: CloudRunExecutor) -> Outcome:
        with pytest.raises(Unreachable, match="502"):
            await executor.submit(asked)
        return await executor.watch(asked, await executor.submit(asked), Heard())

    assert drive(steps) == Finished(None)
    assert len(google.executions) == 1


def test_a_deleted_execution_raises_gone(google: FakeCloudRun) -> None:
    asked = execution("holding")

    async def steps(executor: CloudRunExecutor) -> None:
        name = await executor.submit(asked)
        google.executions.clear()
        with pytest.raises(Gone, match=name):
            await executor.watch(asked, name, Heard())

    drive(steps)


def test_rejected_requests_are_explained(google: FakeCloudRun) -> None:
    with pytest.raises(GiveUp, match="jobs/unknown.*404.*was not found"):
        run(execution("unknown"))
    with pytest.raises(GiveUp, match="32,000"):
        run(execution("quick", input={"text": "x" * 40_000}))


def test_a_service_account_key_yields_tokens(
    google: FakeCloudRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    private = rsa.generate_private_key(public_exponent=65_537, key_size=2_048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    uri = f"http://{google.host}/token"
    key = {"client_email": "runner@acme.iam", "private_key": private.decode(), "token_uri": uri}
    (tmp_path / "key.json").write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")

    assert run(execution("quick")) == Finished(None)
    [claim] = google.claims
    assert (claim["iss"], claim["aud"]) == ("runner@acme.iam", uri)
    (tmp_path / "key.json").write_text("{}")
    with pytest.raises(Unequipped, match="GOOGLE_APPLICATION_CREDENTIALS"):
        run(execution("quick"))


def test_a_rejected_token_is_replaced_once(google: FakeCloudRun) -> None:
    asked = execution("holding")

    async def steps(executor: CloudRunExecutor) -> Outcome:
        name = await executor.submit(asked)
        assert google.tokens == 1
        google.revoked = 1
        google.end(name)
        outcome = await executor.watch(asked, name, Heard())
        assert (google.tokens, google.refused) == (2, 1)
        google.revoked = 1_000
        with pytest.raises(Unreachable, match="401"):
            await executor.watch(asked, name, Heard())
        assert (google.tokens, google.refused) == (3, 3)
        return outcome

    assert drive(steps) == Finished(None)


def test_missing_credentials_are_reported(google: FakeCloudRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(Unreachable, match="GOOGLE_APPLICATION_CREDENTIALS is not set to a file"):
        run(execution("quick"))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"project": "A"}, "project"),
        ({"location": "Europe West"}, "location"),
        ({"job": ""}, "job"),
        ({"env": {"TASK_SPEC": "x"}}, "env"),
        ({"tasks": 0}, "tasks"),
        ({"timeout": 0.0}, "timeout"),
        ({"output": "store", "tasks": 2}, "tasks"),
        ({"output": "store", "env": {"TASK_OUTPUT_PATH": "x"}}, "env"),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], option: str) -> None:
    given = {"project": "acme-prod", "location": "europe-west1", "job": "quick", **options}
    [(name, _)] = CloudRun(**given).problems()
    assert name == option
