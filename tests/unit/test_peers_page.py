"""The tables and charts of the comparison with other queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.benchmarks.peers.page import BEGIN, END, write

SPEEDS = {
    "single_rate": 1,
    "bulk_rate": 2,
    "running_rate": 3,
    "idle_p50": 4.9,
    "idle_p99": 8.1,
    "load_p50": 5,
    "load_p99": 9,
}


def result(version: str, **found: Any) -> dict[str, Any]:
    return {**SPEEDS, "memory": {"worker": 40.0, "scheduler": 60.4}, "versions": {"package": version}, **found}


REPORT = {
    "date": "2026-01-31",
    "machine": {"cores": 2, "processor": "x86_64", "python": "3.12.1", "postgres": "18.1", "redis": "8.0"},
    "options": {"rounds": 3, "rate": 300.0},
    "results": {
        "celery": result("5.7.0", backlog_rate=1005.0, chord=4.8),
        "orchestrator": result("0.1.0", backlog_rate=16_934.2, chord=0.16, chain=0.37, steps=0.8, fibonacci=0.3),
        "huey": result("3.5.4", backlog_rate=4090.0),
        "dbos": {"failed": "could not be installed", "why": "ERROR: no matching distribution"},
    },
}


def test_tables_and_charts_are_written_repeatedly_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "performance.md"
    (tmp_path / "docs" / "images").mkdir(parents=True)
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\n# After\n", encoding="utf-8")
    write(REPORT, tmp_path)
    text = page.read_text(encoding="utf-8")
    write(REPORT, tmp_path)
    assert page.read_text(encoding="utf-8") == text
    assert text.startswith(f"# Before\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\n# After\n")
    lines = text.splitlines()
    assert "old" not in lines
    assert "| **Orchestrator** | 16,930 | 3.0 | 1.0 / 2.0 | 4.9 / 8.1 | 5.0 / 9.0 | 100 | yes |" in lines
    assert "| DBOS | could not be installed | | | | | | |" in lines
    assert "| **Orchestrator** | 0.16 | 3.7 | 125 | 0.3 |" in lines
    assert "| Celery 5.7.0 | 4.8 | – | – | – |" in lines  # noqa: RUF001
    assert sum(line.startswith("| Huey 3.5.4") for line in lines) == 2  # Huey has no compositions here
    assert "at 300/s p50 / p99" in text
    assert "Postgres 18.1" in text

    svg = ElementTree.fromstring((tmp_path / "docs/images/throughput.svg").read_text(encoding="utf-8"))
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[1:] == ["Orchestrator", "16,930 /s", "Huey", "4,090 /s", "Celery", "1,000 /s"]
    bars = {element.get("width") for element in svg.iter("{http://www.w3.org/2000/svg}rect")}
    assert {"500", "121", "30"} <= bars
    assert "prefers-color-scheme: dark" in (tmp_path / "docs/images/latency.svg").read_text(encoding="utf-8")
