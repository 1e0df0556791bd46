"""Metrics of real processes, scraped as Prometheus does it; by Debian's Prometheus, where that is installed."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Process, Stack
from tests.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed: apt-get install prometheus",
)


def expressions() -> list[str]:
    """Return every expression of the rules and of the dashboard, as Grafana would send it."""
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    shown = [expr.replace("$__rate_interval", "1m").replace("$queue", ".*") for expr in shown]
    return [*(rule["expr"] for rule in RULES), *shown]


class Scraped:
    """Processes that serve metrics, and their addresses."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.scheduler = stack.scheduler("--metrics", "0")
        self.worker = stack.worker("--metrics", "0")
        self.addresses = {
            "scheduler": address(self.scheduler),
            "worker": address(self.worker),
            "api": stack.api(),
        }

    def text(self, role: str) -> str:
        return httpx.get(f"{self.addresses[role]}/metrics", timeout=30).raise_for_status().text

    def value(self, role: str, sample: str) -> float:
        found = [line for line in self.text(role).splitlines() if line.startswith(f"{sample} ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


def address(process: Process) -> str:
    eventually(lambda: process.logged("metrics.ready"), f"metrics are served, see {process.log}")
    host, port = re.findall(r"metrics.ready host=(\S+) port=(\d+)", process.log.read_text())[-1]
    return f"http://{host}:{port}"


@pytest.fixture(scope="module")
def scraped(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        scraped = Scraped(stack)
        for number in range(20):
            project.add.enqueue(number, 1)
        project.broken.enqueue("on purpose")
        ended = 'orchestrator_tasks_ended_total{queue="default",state="%s"}'
        eventually(lambda: scraped.value("scheduler", ended % "success") == 20, "all tasks are counted")
        eventually(lambda: scraped.value("scheduler", ended % "failed") == 1, "the failed one is counted")
        httpx.get(f"{scraped.addresses['api']}/healthz").raise_for_status()  # the first request to count
        yield scraped


def test_every_process_is_ready_and_exports_its_metrics(scraped: Scraped) -> None:
    for address in scraped.addresses.values():
        assert httpx.get(f"{address}/healthz").json() == {"status": "ok"}
        eventually(partial(is_ready, address), f"{address} is ready")
    eventually(lambda: scraped.value("scheduler", "orchestrator_scheduler_leading") == 1, "it leads")
    assert scraped.value("scheduler", 'orchestrator_task_run_seconds_count{queue="default"}') == 21
    assert scraped.value("scheduler", 'orchestrator_task_wait_seconds_count{queue="default"}') == 21
    assert scraped.value("scheduler", 'orchestrator_ticks_total{outcome="committed"}') > 0
    assert scraped.value("scheduler", "orchestrator_tick_statements_total") > 0
    assert scraped.value("worker", 'orchestrator_worker_processes{state="working"}') == 1
    assert scraped.value("worker", "orchestrator_worker_slots") == 10
    assert scraped.value("api", 'orchestrator_http_requests_total{method="GET",route="/healthz",status="200"}') >= 1
    eventually(lambda: scraped.value("api", "orchestrator_workers") == 1, "the leader has mirrored the fleet")


def test_rules_and_dashboard_use_existing_metrics(scraped: Scraped) -> None:
    texts = [scraped.text(role) for role in scraped.addresses]
    told = {name for text in texts for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)}
    told |= {"orchestrator_attempts_lost_total", "orchestrator_attempts_retried_total"}  # no such attempts here
    for expression in expressions():
        names = set(re.findall(r"\b(?:orchestrator|process)_\w+", expression))
        assert names, expression
        assert {re.sub("_(bucket|sum|count)$", "", name) for name in names} <= told, expression


def test_each_panel_has_a_title_and_each_rule_a_description() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["title"] for panel in DASHBOARD["panels"])
    for rule in RULES:
        assert rule["alert"].startswith("Orchestrator")
        assert {"summary", "description"} == set(rule["annotations"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def is_ready(place: str) -> bool:
    return httpx.get(f"{place}/readyz", timeout=30).status_code == 200


def obstacles(place: str) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{place}/readyz", timeout=30).json().get("obstacles", {})
    return found


def test_a_process_without_redis_is_not_ready_and_says_why(stack: Stack) -> None:
    leader, standby = stack.scheduler("--metrics", "0"), stack.scheduler("--metrics", "0")
    worker = stack.worker("--metrics", "0")
    places = [address(process) for process in (leader, standby, worker)]
    for place in places:
        eventually(partial(is_ready, place), f"{place} is ready")
    stack.redis.config_set("maxclients", 1)
    try:
        stack.redis.client_kill_filter(_type="normal", skipme=True)
        for place in places:
            eventually(lambda at=place: "redis" in obstacles(at), f"{place} is not ready")  # type: ignore[misc]
            assert httpx.get(f"{place}/healthz").status_code == 200
    finally:
        stack.redis.config_set("maxclients", 10_000)
    for place in places:
        eventually(partial(is_ready, place), f"{place} is ready again")


@NEEDS_PROMETHEUS
def test_promtool_accepts_metrics_and_rules(scraped: Scraped) -> None:
    for role in scraped.addresses:
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=scraped.text(role), capture_output=True, text=True, timeout=60
        )
        assert (checked.returncode, checked.stderr) == (0, "")
    checked = subprocess.run(
        ["promtool", "check", "rules", DOCS / "alerts.yaml"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


@pytest.fixture
def prometheus(scraped: Scraped, tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes every process, with our rules; yield its address."""
    targets = [
        {"targets": [place.removeprefix("http://")], "labels": {"role": role}}
        for role, place in scraped.addresses.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DOCS / "alerts.yaml")],
        "scrape_configs": [{"job_name": "orchestrator", "static_configs": targets}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(60)


def ask(prometheus: str, path: str, **query: str) -> Any:
    try:
        answer = httpx.get(f"{prometheus}/{path}", params=query, timeout=30)
    except httpx.TransportError:
        return None
    return answer.json()["data"] if answer.status_code == 200 else None


@NEEDS_PROMETHEUS
def test_prometheus_scrapes_all_and_evaluates_every_rule_and_panel(scraped: Scraped, prometheus: str) -> None:
    def missing() -> list[str]:
        targets = (ask(prometheus, "targets") or {"activeTargets": []})["activeTargets"]
        up = [target for target in targets if target["health"] == "up"]
        return [] if len(up) == 3 else [f"{len(targets)} targets", *(target["lastError"] for target in targets)]

    eventually(lambda: not missing(), "every process is scraped")
    wanted = 'sum(orchestrator_tasks_ended_total{state="success"})'
    ended = eventually(
        lambda: (ask(prometheus, "query", query=wanted) or {"result": []})["result"],
        "what was scraped can be asked for",
    )
    assert float(ended[0]["value"][1]) == 20

    def evaluated() -> list[dict[str, Any]]:
        groups = (ask(prometheus, "rules") or {"groups": []})["groups"]
        found = [rule for group in groups for rule in group["rules"] if rule["health"] != "unknown"]
        return found if len(found) == len(RULES) else []

    rules = eventually(evaluated, "all rules are evaluated")
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
    for expression in expressions():
        assert ask(prometheus, "query", query=expression) is not None, expression
