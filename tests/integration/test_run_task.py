"""`orchestrator run-task` runs one task in a process of its own, and writes its status and output to a given folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from orchestrator.workers.container import Board, LocalFolder, Specification, folder_of, run, split
from tests import forking
from tests.waiting import eventually

HERE = Path(__file__).parent


def begin(*words: str, **environ: str) -> forking.Program:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TASK_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forking.begin("run-task", *words, environment={**variables, **environ}, folder=HERE, **pipes)


def end(process: forking.Program) -> tuple[int, str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        out, said = process.stdout.read(), process.stderr.read()
        return process.wait(60), out, said


def status(folder: Path) -> dict[str, Any]:
    found = folder / "status.json"
    return dict(json.loads(found.read_bytes())) if found.exists() else {}


def test_a_task_of_the_application_writes_its_output(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"task": "double", "task_id": "t1", "attempt": 2, "input": {"number": 4}, "more": 1}))
    place = tmp_path / "left" / "here"
    given = {"TASK_SPEC_PATH": str(spec), "TASK_OUTPUT_PATH": str(place)}
    code, out, _ = end(begin("--app", "container_jobs:app", **given))

    assert code == 0
    assert out.splitlines()[0] == "doubling"
    assert json.loads(out.splitlines()[-1]) == 8
    assert json.loads((place / "output.json").read_bytes()) == 8
    said = status(place)
    assert (said["status"], said["task_id"], said["attempt"]) == ("success", "t1", 2)
    assert sorted(path.name for path in place.iterdir()) == ["output.json", "status.json"]


def test_a_function_can_read_its_input_from_a_variable() -> None:
    code, out, _ = end(begin("container_jobs:later", TASK_SPEC='{"arguments": [5]}'))
    assert (code, out.split()) == (0, ["15"])


@pytest.mark.parametrize(
    ("function", "input", "kind", "retryable"),
    [
        ("fail", {"final": False}, "ValueError", True),
        ("fail", {"final": True}, "GiveUp", False),
        ("odd", {}, "", False),
    ],
)
def test_a_failed_task_exits_with_1_and_a_traceback(
    function: str, input: dict[str, Any], kind: str, retryable: bool, tmp_path: Path
) -> None:
    given = {"TASK_SPEC": json.dumps({"input": input}), "TASK_OUTPUT_PATH": str(tmp_path)}
    code, out, said = end(begin(f"container_jobs:{function}", **given))
    assert (code, out.strip()) == (1, "")
    assert "Traceback" in said
    left = status(tmp_path)
    assert left["status"] == "failed"
    if kind:
        assert (left["error"]["kind"], left["error"]["retryable"]) == (kind, retryable)
    assert not (tmp_path / "output.json").exists()


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (["container_jobs:double"], {}, "Neither TASK_SPEC_PATH nor TASK_SPEC"),
        (["container_jobs:double"], {"TASK_SPEC": "["}, "in TASK_SPEC is not a valid"),
        (["container_jobs:double"], {"TASK_SPEC_PATH": "/no/such/file"}, "no file /no/such/file"),
        (["container_jobs:nothing"], {"TASK_SPEC": "{}"}, "There is no function"),
        (["--app", "container_jobs:app"], {"TASK_SPEC": '{"task": "dubble"}'}, "double"),
    ],
)
def test_invalid_input_exits_with_78(words: list[str], environ: dict[str, str], said: str) -> None:
    code, _, shown = end(begin(*words, **environ))
    assert code == 78
    assert said in shown
    assert "Traceback" not in shown


def test_an_unwritable_output_folder_exits_with_75(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = {"TASK_SPEC": '{"arguments": [1]}', "TASK_OUTPUT_PATH": str(tmp_path / "file")}
    code, _, said = end(begin("container_jobs:double", **given))
    assert code == 75
    assert "cannot be used" in said


def test_sigterm_lets_the_function_clean_up_and_is_recorded(tmp_path: Path) -> None:
    given = {"TASK_SPEC": json.dumps({"input": {"folder": str(tmp_path)}}), "TASK_OUTPUT_PATH": str(tmp_path)}
    process = begin("container_jobs:hold", **given)
    eventually((tmp_path / "begun").exists, "it runs")
    assert status(tmp_path)["status"] == "running"
    process.send_signal(signal.SIGTERM)
    code, _, _ = end(process)
    assert code == 143
    assert (tmp_path / "cleaned").exists()
    assert (status(tmp_path)["status"], status(tmp_path)["error"]["kind"]) == ("failed", "Terminated")


def test_a_killed_process_leaves_a_stale_heartbeat(tmp_path: Path) -> None:
    given = {"TASK_SPEC": json.dumps({"input": {"folder": str(tmp_path)}}), "TASK_OUTPUT_PATH": str(tmp_path)}
    process = begin("container_jobs:hold", **given)
    eventually((tmp_path / "begun").exists, "it runs")
    process.kill()
    code, _, _ = end(process)
    assert code == -signal.SIGKILL
    left = status(tmp_path)
    assert left["status"] == "running"
    assert left["heartbeat"] <= time.time()
    assert not (tmp_path / "output.json").exists()


def test_files_are_replaced_atomically(tmp_path: Path) -> None:
    place, over = LocalFolder(tmp_path), threading.Event()
    torn: list[bytes] = []

    def read() -> None:
        while not over.is_set():
            if (tmp_path / "file").exists() and len(data := place.read("file")) != 1_000_000:
                torn.append(data)

    reading = threading.Thread(target=read)
    reading.start()
    for number in range(20):
        place.write("file", bytes([number]) * 1_000_000)
    over.set()
    reading.join()
    assert torn == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_heartbeats_last_as_long_as_the_function_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    board = Board(LocalFolder(tmp_path), Specification(), interval=0.01)
    beats: list[float] = []

    def work() -> int:
        for _ in range(3):
            beats.append(status(tmp_path)["heartbeat"])
            eventually(lambda: status(tmp_path)["heartbeat"] > beats[-1], "the next heartbeat")
        return 1

    assert run(work, board) == 0
    assert capfd.readouterr().out.split() == ["1"]
    board._heartbeat_thread.join(10)
    assert not board._heartbeat_thread.is_alive()
    assert status(tmp_path)["status"] == "success"


def test_an_fsspec_url_is_a_valid_output_folder() -> None:
    folder, file = split("memory://bucket/runs/1/spec.json")
    assert (folder, file) == ("memory://bucket/runs/1", "spec.json")
    place = folder_of(folder)
    place.write("output.json", b"1")
    place.write("output.json", b"22")
    assert place.read("output.json") == b"22"
    assert fsspec.filesystem("memory").cat_file("/bucket/runs/1/output.json") == b"22"
    with pytest.raises(FileNotFoundError):
        place.read("none")
    assert [split("/spec.json"), split("spec.json"), split("a/b")] == [
        ("/", "spec.json"),
        (".", "spec.json"),
        ("a", "b"),
    ]
