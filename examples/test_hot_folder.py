"""Test a custom executor with the package's conformance suite, here the executor of docs/executors.md.

Save that as hot_folder.py with its entry point installed, then: pytest test_hot_folder.py
"""

import json
import threading

from hot_folder import HotFolder

from orchestrator.testing.executors import AWAY, ExecutorConformance, ExecutorHarness


class HotFolderHarness(ExecutorHarness):
    name = "hot_folder"
    without = AWAY | {
        "test_what_the_work_says_is_in_the_log_of_its_task"
    }  # a folder is never unavailable, and has no log

    def __init__(self, folder):
        super().__init__(folder)
        self.begun, self.values, self.over = {}, {}, threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def options(self):
        return HotFolder(path=str(self.folder))

    def serve(self):
        while not self.over.wait(0.02):
            for request in self.folder.glob("*.request"):
                if request not in self.begun:
                    self.begun[request] = json.loads(request.read_text())
                work, draft = self.begun[request], request.with_suffix(".reply")
                answer = {
                    "return": {"result": work.get("value")},
                    "fail": {"error": work.get("message")},
                    "hold": {"result": self.values[work["id"]]} if work["id"] in self.values else None,
                    "large": {"result": "x" * work.get("bytes", 0)},
                }.get(work["do"], "garbage")
                if answer is not None and not request.with_suffix(".answer").exists():
                    draft.write_text(json.dumps(answer))
                    draft.rename(request.with_suffix(".answer"))

    def started(self, id):
        return sum(work["id"] == id for work in list(self.begun.values()))

    def is_running(self, id):
        return any(work["id"] == id and request.exists() for request, work in list(self.begun.items()))

    def let_go(self, id, value=None):
        self.values[id] = value

    def lose(self, id):
        for request in [request for request, work in self.begun.items() if work["id"] == id]:
            request.unlink(missing_ok=True)

    def close(self):
        self.over.set()
        self.thread.join()


class TestHotFolder(ExecutorConformance):
    harness_type = HotFolderHarness
