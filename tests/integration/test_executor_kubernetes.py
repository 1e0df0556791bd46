"""Tasks that run as Kubernetes Jobs, against a fake server that validates requests by the models of the API."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.errors import GiveUp
from orchestrator.plugins.executors.kubernetes import Kubernetes
from orchestrator.plugins.executors.kubernetes.access import find_cluster
from orchestrator.plugins.executors.kubernetes.driver import KubernetesExecutor
from orchestrator.plugins.executors.kubernetes.job import job_of
from orchestrator.settings import Settings
from orchestrator.workers.executors import driving
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable
from tests.integration import executing
from tests.integration.executing import Driver, Heard, until
from tests.integration.fake_kubernetes import FakeKubernetes, Refused, check_model
from tests.integration.guide import example
from tests.waiting import eventually

_DRIVER = Driver(lambda **settings: KubernetesExecutor(Setup(settings=Settings(**settings))))
drive, run = _DRIVER.drive, _DRIVER.run


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    server = FakeKubernetes()
    server.token = "hunter2"
    configure(monkeypatch, tmp_path, {"server": server.url}, {"token": server.token})
    yield server
    server.stop()


def configure(monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> None:
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "jobs"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def python(code: str, **more: Any) -> Kubernetes:
    return Kubernetes(**{"image": "python:3", "command": [sys.executable, "-c", code], "labels": {"team": "a"}, **more})


def execution(options: Kubernetes, timeout: float | None = None, **input: Any) -> Execution:
    return executing.execution(options, input=input, timeout=timeout)


READ = {
    "env": "import json, os; spec = json.loads(os.environ['TASK_SPEC'])",
    "config_map": "import json, os; spec = json.load(open(os.environ['TASK_SPEC_PATH']))",
    "secret": "import json, os; spec = json.load(open(os.environ['TASK_SPEC_PATH']))",
}


@pytest.mark.parametrize("input", ["env", "config_map", "secret"])
def test_a_job_is_created_once_and_cleaned_up(cluster: FakeKubernetes, input: str) -> None:
    code = f"{READ[input]}; print('working'); print(json.dumps(dict(doubled=2 * spec['input']['number'])))"
    more = {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}, "env": {"A": "b"}, "service_account": "runner"}
    asked, heard = execution(python(code, input=input, **more), timeout=30, number=4), Heard()

    async def steps(executor: KubernetesExecutor) -> Outcome:
        names = await asyncio.gather(*(executor.submit(asked) for _ in range(3)))
        assert set(names) == {f"jobs/{asked.name}"}
        outcome = await executor.watch(asked, names[0], heard)
        assert await executor.watch(asked, await executor.submit(asked), Heard()) == outcome
        await executor.expire(asked, names[0])
        ttl = cluster.things["jobs", "jobs", asked.name]["spec"]["ttlSecondsAfterFinished"]
        assert 60 <= ttl < 120, "it goes a minute from now, if nobody is left to delete it"
        await executor.release(asked, names[0])
        await executor.expire(asked, names[0])
        await executor.release(asked, names[0])
        return outcome

    assert drive(steps) == Finished({"doubled": 8})
    assert heard.lines == ["info: working"]
    assert cluster.created[asked.name] == 1
    eventually(lambda: not cluster.things, "a namespace without anything")


def test_the_job_of_a_killed_driver_expires_in_a_minute(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly a Job stayed for a day if its driver was killed between the end and the release."""
    monkeypatch.setattr(driving, "_RELEASE_AFTER", 600.0)  # the driver is killed before that
    asked = execution(python("print(7)"))

    def ttl() -> int:
        return int(cluster.things["jobs", "jobs", asked.name]["spec"]["ttlSecondsAfterFinished"])

    async def steps(executor: KubernetesExecutor) -> Any:
        ended = await executing.watched_to_the_end(executor, asked, timeout=60.0)
        await until(lambda: ttl() < 120)
        return ended

    assert drive(steps) == 7


@pytest.mark.parametrize(
    ("code", "output", "result"),
    [
        ("print('a'); print('no json')", "log", "no json"),
        ("pass", "log", None),
        ("print('{\"a\": 1}')", "none", None),
        ("import os; open(os.environ['MESSAGE'], 'w').write('[1, 2]'); print('x')", "message", [1, 2]),
        ("print('x' * 3_000_000)", "log", "x" * 3_000_000),
    ],
)
def test_the_result_is_the_last_line_or_the_termination_message(
    cluster: FakeKubernetes, code: str, output: str, result: Any
) -> None:
    assert run(execution(python(code, output=output))) == Finished(result)


LEFT = """
import json, os
place = os.environ["TASK_OUTPUT_PATH"]
os.makedirs(place)
open(f"{place}/output.json", "w").write(json.dumps("x" * 100_000))
status = {"status": "success"} if CODE == 0 else {"status": "failed", "error": {"kind": "ValueError", "message": "no"}}
open(f"{place}/status.json", "w").write(json.dumps(status))
print("a line")
raise SystemExit(CODE)
"""


@pytest.mark.parametrize(
    ("code", "expected"), [(0, Finished("x" * 100_000)), (1, Broken("ValueError", "no"))], ids=["done", "failed"]
)
def test_output_in_the_payload_store_is_read_and_deleted(
    cluster: FakeKubernetes, tmp_path: Path, code: int, expected: Outcome
) -> None:
    asked, heard = execution(python(LEFT.replace("CODE", str(code)), output="store")), Heard()

    async def steps(executor: KubernetesExecutor) -> Outcome:
        name = await executor.submit(asked)
        outcome = await executor.watch(asked, name, heard)
        assert len(list(tmp_path.rglob("output.json"))) == 1
        await executor.release(asked, name)
        return outcome

    assert drive(steps, payload_store=str(tmp_path)) == expected
    assert heard.lines == ["info: a line"]
    assert list(tmp_path.rglob("output.json")) == []


def test_the_example_of_the_guide_runs(cluster: FakeKubernetes) -> None:
    options, input = example("kubernetes")
    assert isinstance(options, Kubernetes)
    assert run(execution(options, **input)) == Finished(6)


def test_an_exit_code_is_a_failure_with_the_log_tail(cluster: FakeKubernetes) -> None:
    outcome = run(execution(python("print('on the way'); raise SystemExit(3)")))

    assert outcome == Broken("ExitCode", "The container ended with exit code 3.", detail="on the way")


def test_the_jobs_deadline_is_slightly_after_the_task_timeout(cluster: FakeKubernetes) -> None:
    outcome = run(execution(python("import time; time.sleep(60)", deadline=1), timeout=0.3))

    assert isinstance(outcome, Broken)
    assert outcome.kind == "DeadlineExceeded"
    late = execution(Kubernetes(image="a"), timeout=0.3)
    assert job_of(late, Kubernetes(image="a"))["spec"]["activeDeadlineSeconds"] == 11


def test_a_cancel_deletes_the_job_and_its_pod(cluster: FakeKubernetes, tmp_path: Path) -> None:
    asked = execution(python(f"import time; open({str(tmp_path / 'began')!r}, 'w'); time.sleep(60)", input="secret"))

    async def steps(executor: KubernetesExecutor) -> None:
        name = await executor.submit(asked)
        watching = asyncio.create_task(executor.watch(asked, name, Heard()))
        await until(lambda: (tmp_path / "began").exists() and cluster.has_pods())  # the fake server knows its process
        await executor.cancel(asked, "")
        assert cluster._processes[asked.name].poll() == -15
        assert not cluster.things
        with pytest.raises(Gone, match=asked.name):
            await watching
        await executor.cancel(asked, name)

    drive(steps)


def test_a_second_watcher_finds_the_job(cluster: FakeKubernetes, tmp_path: Path) -> None:
    go = tmp_path / "go"
    asked = execution(python(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint(7)"))

    async def first(executor: KubernetesExecutor) -> None:
        watching = asyncio.create_task(executor.watch(asked, await executor.submit(asked), Heard()))
        await until(lambda: cluster.watching)
        watching.cancel()

    async def second(executor: KubernetesExecutor) -> Outcome:
        name = await executor.submit(asked)
        go.touch()
        return await executor.watch(asked, name, Heard())

    drive(first)
    assert drive(second) == Finished(7)
    assert cluster.created[asked.name] == 1


@pytest.mark.parametrize("how", ["cut", "forgotten"])
def test_a_broken_watch_resumes_or_restarts(cluster: FakeKubernetes, tmp_path: Path, how: str) -> None:
    go = tmp_path / "go"
    asked = execution(python(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint(7)"))

    async def steps(executor: KubernetesExecutor) -> Outcome:
        watching = asyncio.create_task(executor.watch(asked, await executor.submit(asked), Heard()))
        await until(lambda: cluster.watching == 2)
        go.touch()  # the Job may end while no watch is open
        cluster.cut_watches() if how == "cut" else cluster.forget()
        return await watching

    assert drive(steps) == Finished(7)


def test_one_watch_per_resource_serves_all_jobs(cluster: FakeKubernetes, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\nprint(7)"
    some = [execution(python(code)) for _ in range(8)]

    async def steps(executor: KubernetesExecutor) -> list[Outcome]:
        names = await asyncio.gather(*map(executor.submit, some))
        watching = [
            asyncio.create_task(executor.watch(one, name, Heard())) for one, name in zip(some, names, strict=True)
        ]
        await until(lambda: cluster.watching == 2)
        go.touch()
        outcomes = await asyncio.gather(*watching)
        assert cluster.requests.count(("GET", "/apis/batch/v1/namespaces/jobs/jobs")) == 2, "a list and a watch"
        return outcomes

    assert drive(steps) == [Finished(7)] * len(some)


def test_an_image_that_cannot_be_pulled_fails_the_attempt(cluster: FakeKubernetes) -> None:
    heard = Heard()
    hopeless = run(execution(Kubernetes(image="bad image")), heard)
    late = run(execution(Kubernetes(image="missing:1", image_patience=0.2)))

    assert hopeless == Broken(
        "ImagePullFailed", "The Pod does not start: InvalidImageName: cannot pull bad image", False
    )
    assert heard.lines == ["warning: The Pod does not start: InvalidImageName: cannot pull bad image"]
    assert late == Broken("ImagePullFailed", "The Pod does not start: ImagePullBackOff: cannot pull missing:1", True)


def test_a_deleted_job_raises_gone(cluster: FakeKubernetes) -> None:
    asked = execution(python("import time; time.sleep(60)"))

    async def steps(executor: KubernetesExecutor) -> None:
        name = await executor.submit(asked)
        watching = asyncio.create_task(executor.watch(asked, name, Heard()))
        await until(lambda: cluster.watching == 2)
        cluster.delete("jobs", "jobs", asked.name, {})
        with pytest.raises(Gone, match="deleted"):
            await watching
        with pytest.raises(Gone):
            await executor.watch(asked, name, Heard())

    drive(steps)


def test_a_cluster_is_unreachable_until_it_returns(cluster: FakeKubernetes) -> None:
    asked = execution(python("import time; time.sleep(60)"))

    async def steps(executor: KubernetesExecutor) -> None:
        name = await executor.submit(asked)
        watching = asyncio.create_task(executor.watch(asked, name, Heard()))
        await until(lambda: cluster.watching == 2)
        cluster.is_away = True
        cluster.cut_watches()
        with pytest.raises(Unreachable, match="503"):
            await watching
        with pytest.raises(Unreachable):
            await executor.submit(asked)
        with pytest.raises(Unreachable):
            await executor.cancel(asked, name)
        cluster.is_away = False
        await executor.cancel(asked, name)

    drive(steps)


@pytest.mark.parametrize(
    ("namespace", "error", "said"),
    [("nowhere", GiveUp, 'namespaces "nowhere" not found'), ("full", Unreachable, "exceeded quota")],
)
def test_permanent_and_temporary_rejections_are_distinguished(
    cluster: FakeKubernetes, namespace: str, error: type[Exception], said: str
) -> None:
    async def steps(executor: KubernetesExecutor) -> None:
        with pytest.raises(error, match=said):
            await executor.submit(execution(python("pass", namespace=namespace)))

    drive(steps)


def test_an_oversized_input_is_rejected_with_the_remedy(cluster: FakeKubernetes) -> None:
    async def steps(executor: KubernetesExecutor) -> None:
        with pytest.raises(GiveUp, match="set the option input to secret or config_map"):
            await executor.submit(execution(python("pass"), text="x" * 200_000))

    drive(steps)


def test_the_fake_server_validates_requests() -> None:
    with pytest.raises(Refused, match=r'unknown field ".spec.retries"'):
        check_model("V1Job", {"spec": {"retries": 3}})
    with pytest.raises(Refused, match="expected int"):
        check_model("V1Job", {"spec": {"backoffLimit": "0"}})


def certificate(folder: Path, name: str) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    where = ["-keyout", f"{folder / name}.key", "-out", f"{folder / name}.crt"]
    who = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *where, *who], check=True, capture_output=True)


def test_a_client_certificate_authenticates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate(tmp_path, "server")
    certificate(tmp_path, "client")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "client.crt"))
    tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    server = FakeKubernetes(tls)
    data = {name: base64.b64encode((tmp_path / name).read_bytes()).decode() for name in ("client.crt", "client.key")}
    place = {"server": server.url, "certificate-authority": "server.crt"}
    user = {"client-certificate-data": data["client.crt"], "client-key-data": data["client.key"]}

    configure(monkeypatch, tmp_path, place, user)
    assert run(execution(python("print(1)"))) == Finished(1)
    for cluster, who in (({"server": server.url}, user), (place, {})):
        configure(monkeypatch, tmp_path, cluster, who)
        with pytest.raises(Unreachable):
            run(execution(python("print(1)")))
    server.stop()


def test_a_service_account_authenticates_and_reloads_its_token(tmp_path: Path) -> None:
    certificate(tmp_path, "ca")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "ca.crt", tmp_path / "ca.key")
    server = FakeKubernetes(tls)
    server.token = "abc"
    (tmp_path / "token").write_text("abc\n")
    (tmp_path / "namespace").write_text("team-a\n")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}

    async def steps() -> int:
        cluster = find_cluster("", environ, tmp_path)
        assert cluster.namespace == "team-a"
        jobs = "/apis/batch/v1/namespaces/team-a/jobs"
        assert (await cluster.api.ask("GET", jobs)).status == 200
        server.token = "def"
        assert (await cluster.api.ask("GET", jobs)).status == 401
        (tmp_path / "token").write_text("def\n")
        return (await cluster.api.ask("GET", jobs)).status

    assert asyncio.run(steps()) == 200
    server.stop()


@pytest.mark.parametrize(
    ("user", "said"), [({"exec": {"command": "aws"}}, "exec"), ({"auth-provider": {}}, "auth-provider")]
)
def test_unsupported_authentication_methods_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: dict[str, Any], said: str
) -> None:
    configure(monkeypatch, tmp_path, {"server": "https://127.0.0.1:1"}, user)
    with pytest.raises(Unequipped, match=f"{said}.*not support"):
        run(execution(python("pass")))


def test_a_missing_kubeconfig_or_context_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(Unequipped, match="KUBECONFIG"):
        run(execution(python("pass")))
    configure(monkeypatch, tmp_path, {"server": "https://127.0.0.1:1"}, {})
    with pytest.raises(Unequipped, match="no context 'there' among its contexts: here"):
        run(execution(python("pass", context="there")))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"image": ""}, "image"),
        ({"namespace": "A_b"}, "namespace"),
        ({"env": {"TASK_SPEC": "x"}}, "env"),
        ({"requests": {"cpu": "much"}}, "requests"),
        ({"labels": {"a": "b c"}}, "labels"),
        ({"ttl": 0}, "ttl"),
        ({"deadline": 0}, "deadline"),
        ({"image_patience": -1.0}, "image_patience"),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], option: str) -> None:
    [(name, _)] = Kubernetes(**{"image": "a", **options}).problems()
    assert name == option
