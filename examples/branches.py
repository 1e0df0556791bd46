"""A flow with two branches, published, started twice and followed over plain HTTP; its nodes are services.

orchestrator dev                                                                        # prints the address of its API
orchestrator serve --app services:app --port 8080 --registry http://localhost:8000
SCHEDULER_BASE=http://localhost:8000 python branches.py
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any

BASE = os.environ.get("SCHEDULER_BASE", "http://localhost:8000")
FLOW = {
    "start": "double",
    "nodes": {
        "double": {
            "kind": "executor",
            "service": "transform",
            "params": {"mul": 2},
            "prep": {"input_key": "$params.val"},
            "post": {"output_key": "doubled"},
        },
        "route": {
            "kind": "executor",
            "service": "route",
            "prep": {"input_key": "doubled"},
            "post": {"action_key": "action"},
        },
        "B": {
            "kind": "executor",
            "service": "transform",
            "params": {"mul": 10},
            "prep": {"input_key": "doubled"},
            "post": {"output_key": "result"},
        },
        "C": {
            "kind": "executor",
            "service": "sum",
            "prep": {"input_key": "$params.list"},
            "post": {"output_key": "result"},
        },
    },
    "edges": [
        {"from": "double", "action": "default", "to": "route"},
        {"from": "route", "action": "goB", "to": "B"},
        {"from": "route", "action": "goC", "to": "C"},
    ],
}


def ask(path: str, body: Any = None) -> Any:
    """Send a POST request with a body, or a GET request without one."""
    headers = {"Content-Type": "application/json"}
    if "KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['KEY']}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(BASE + path, data, headers), timeout=30) as answer:
        return json.load(answer)


def main() -> None:
    """Run the flow once for each branch."""
    flow = ask("/flows", {"name": "branches"})["id"]
    ask("/flows/version", {"flow_id": flow, "definition": FLOW, "status": "published"})
    for action in ("goB", "goC"):
        params = {"val": 2, "list": [1, 2, 3], "action": action}
        task = ask("/tasks", {"flow_id": flow, "params": params})["id"]
        while (state := ask(f"/tasks/get?id={task}"))["status"] in ("pending", "running"):
            time.sleep(0.2)
        print(f"{action}: {state['status']}, result = {state['shared'].get('result')}")
        for run in ask(f"/tasks/runs?task_id={task}"):
            print(f"  {run['node_key']}, attempt {run['attempt_no']}: {run['status']} {run['exec_output_json']}")


if __name__ == "__main__":
    main()
