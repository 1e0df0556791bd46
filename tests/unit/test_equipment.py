"""What a worker announces for its executors."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.tasks.obstacles import no_executor
from orchestrator.plugins.executors import cloud_run, kubernetes
from orchestrator.plugins.executors.dask import Dask
from orchestrator.plugins.executors.kubernetes import Kubernetes
from orchestrator.plugins.executors.ray import Ray
from orchestrator.plugins.executors.rq import Rq
from orchestrator.settings import Settings
from orchestrator.workers.executors import registry
from orchestrator.workers.executors.protocol import Setup
from orchestrator.workers.executors.registry import equipment

SETUP = Setup(settings=Settings(), worker="w")


@pytest.mark.parametrize(
    ("executor", "environ", "said"),
    [
        ("rq", {}, ["rq"]),
        (
            "rq",
            {"RQ_REDIS_URL": "redis://a", "MINE": "unix:///b", "OTHER_QUEUES": "http://c"},
            ["rq", "rq MINE", "rq RQ_REDIS_URL"],
        ),
        ("dask", {"DASK_SCHEDULER_ADDRESS": "tcp://a:8786"}, ["dask", "dask DASK_SCHEDULER_ADDRESS"]),
        ("dask", {"DASK_SCHEDULER_ADDRESS": ""}, ["dask"]),
        ("ray", {}, []),
        ("ray", {"RAY_API_SERVER_ADDRESS": "http://head:8265"}, ["ray RAY_API_SERVER_ADDRESS"]),
        ("http", {}, ["http"]),
        ("of-nobody", {}, []),
    ],
)
def test_a_worker_announces_the_configured_targets_of_an_executor(
    executor: str, environ: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: package)  # as if all extras were installed
    assert equipment(executor, SETUP, environ) == said


@pytest.mark.parametrize(
    ("options", "wants"),
    [
        (Rq(function="a:b"), "rq RQ_REDIS_URL"),
        (Rq(function="a:b", url="redis://here"), "rq"),
        (Dask(function="a:b", address_variable="MINE"), "dask MINE"),
        (Dask(function="a:b", address="tcp://here:1"), "dask"),
        (Ray(function="a:b"), "ray RAY_API_SERVER_ADDRESS"),
        (Kubernetes(image="a"), "kubernetes"),
        (Kubernetes(image="a", context="there"), "kubernetes there"),
    ],
)
def test_a_task_requires_the_target_of_its_executor(options: ExecutorOptions, wants: str) -> None:
    assert options.wants == wants
    assert wants.partition(" ")[2] in no_executor("q", "'job'", wants)


def test_clusters_are_the_contexts_of_the_kubeconfig(tmp_path: Path) -> None:
    config = tmp_path / "config"
    environ = {"KUBECONFIG": str(config)}
    assert equipment("kubernetes", SETUP, environ) == []
    config.write_text("contexts: [{name: b}, {name: a}, {}]\n")
    assert equipment("kubernetes", SETUP, environ) == ["kubernetes a", "kubernetes b"]
    config.write_text("current-context: a\ncontexts: [{name: a}]\n")
    assert equipment("kubernetes", SETUP, environ) == ["kubernetes", "kubernetes a"]
    for broken in ("contexts: 3", "[", "- a", "\xff"):
        config.write_text(broken, encoding="latin-1")
        assert equipment("kubernetes", SETUP, environ) == []


def test_a_service_account_of_a_pod_is_enough_for_kubernetes(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": str(tmp_path / "none")}
    assert kubernetes._equipment(environ, tmp_path) == []
    (tmp_path / "token").touch()
    assert kubernetes._equipment(environ, tmp_path) == ["kubernetes"]


def test_cloud_run_needs_a_google_machine_or_a_key_file(tmp_path: Path) -> None:
    model, key = tmp_path / "product_name", tmp_path / "key.json"
    assert cloud_run._equipment({}, model) == []
    assert cloud_run._equipment({"GCE_METADATA_HOST": "here"}, model) == ["cloud_run"]
    assert cloud_run._equipment({"GOOGLE_APPLICATION_CREDENTIALS": str(key)}, model) == []
    key.touch()
    assert cloud_run._equipment({"GOOGLE_APPLICATION_CREDENTIALS": str(key)}, model) == ["cloud_run"]
    model.write_text("Google Compute Engine\n")
    assert cloud_run._equipment({}, model) == ["cloud_run"]


def test_missing_programs_are_not_announced() -> None:
    commands = ("/bin/sh", "/no/such/program", "/opt/jobs/*", "sh")
    said = equipment("process", Setup(settings=Settings(), worker="w", commands=commands), {"PATH": "/bin"})
    assert said == ["process /bin/sh", "process /opt/jobs/*", "process sh"]
