"""Schemathesis tries the whole OpenAPI document on a stack with data: no request causes a server error."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.acceptance.conftest import fresh_stack
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(find_spec("schemathesis") is None, reason="Schemathesis is not installed")

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
DEFINITION = {
    "name": "fuzzed",
    "params": {"n": {"default": 1}},
    "tasks": {
        "first": {"task": "project.add", "input": {"a": "${params.n}", "b": 1}},
        "each": {"task": "project.noop", "depends_on": ["first"], "foreach": "${[1, 2]}", "input": {}},
    },
    "schedule": {"cron": "0 3 * * *"},
}


def fill(client: httpx.Client) -> None:
    """Create tasks, a workflow and a run, as data for the routes."""
    for call in (
        {"name": "project.add", "args": [1, 2]},
        {"name": "project.broken", "args": ["so"]},
        {"name": "nobody"},
    ):
        client.post("/api/v1/tasks", json=call).raise_for_status()
    client.post("/workflows", json=DEFINITION).raise_for_status()
    run = client.post("/workflows/fuzzed/runs", json={"tags": ["fuzz"]}).raise_for_status().json()["id"]
    eventually(lambda: client.get(f"/runs/{run}").json()["run"]["ended_at"], "a run has ended")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("phases", ["examples,coverage", "fuzzing,stateful"])
@pytest.mark.long
def test_no_request_causes_a_server_error(
    database_url: str, redis_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, phases: str
) -> None:
    import project

    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker(processes=1)
        address = stack.api()
        with httpx.Client(base_url=address, timeout=30) as client:
            fill(client)
        project.approval.start(600.0)
        (tmp_path / "schemathesis.toml").write_text('[parameters]\n"query.wait" = 0.1\n')  # instead of up to a minute
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "schemathesis"),
                *("run", f"{address}/openapi.json", "--checks", ",".join(CHECKS), "--seed", "1", "--no-color"),
                *("--phases", phases, "--max-examples", "4", "--request-timeout", "60"),
                *("--suppress-health-check", "all", "--warnings", "off"),
                # routes that wait by design: streams, updates that code may answer later, polling for work
                *("--exclude-path-regex", r"(}|/status|/logs)/events$|/updates/|^/queue/poll$"),
            ],
            cwd=tmp_path,
            env=stack.environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
