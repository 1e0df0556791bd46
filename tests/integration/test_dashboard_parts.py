"""A reloaded page omits the rows that the browser already has."""

from __future__ import annotations

import re

from orchestrator.api.app import create_app
from tests.integration.stage import System
from tests.integration.visitor import Visitor


def test_a_reloaded_page_omits_known_rows(system: System) -> None:
    job = system.app.task(name="left_out")(lambda: None)
    old = [str(job.enqueue().id) for _ in range(3)]
    visitor = Visitor(create_app(system.settings))
    assert "ETag" not in visitor.get("/ui/tasks").headers, "nobody has asked for a part"

    def again(known: str) -> tuple[int, str, str]:
        answer = visitor.get("/ui/tasks", **{"If-None-Match": known})
        return answer.status_code, answer.text, answer.headers["ETag"]

    status, whole, version = again("none")
    assert (status, "data-same" in whole) == (200, False)
    assert again(version) == (304, "", version)
    new = str(job.enqueue().id)
    status, part, newer = again(version)
    assert re.findall(r'<tr data-key="([^"]+)" data-same></tr>', part) == old[::-1]
    assert f'href="/ui/tasks/{new}"' in part
    assert all(f'href="/ui/tasks/{id}"' not in part for id in old)
    assert newer != version
    status, other, _ = again('"of another server"')
    assert (status, "data-same" in other) == (200, False)


def test_an_error_page_has_no_etag(system: System) -> None:
    visitor = Visitor(create_app(system.settings))
    for _ in range(2):
        answer = visitor.get("/ui/queues/none", **{"If-None-Match": "none"})
        assert (answer.status_code, "ETag" in answer.headers) == (404, False)
