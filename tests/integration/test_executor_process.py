"""The `process` executor with real commands: their environment, limits, output and cleanup."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from orchestrator.domain.executors.builtin import Process
from orchestrator.domain.executors.options import Broken, Execution, Finished, Outcome
from orchestrator.domain.executors.record import ExecutorCall, Record
from orchestrator.domain.redaction import HIDDEN
from orchestrator.domain.tasks.task import Returned
from orchestrator.errors import ConfigurationError, GiveUp, PayloadError
from orchestrator.settings import load_settings
from orchestrator.transport.codec import LogLine
from orchestrator.workers.executors import driving
from orchestrator.workers.executors import spool as spools
from orchestrator.workers.executors.listener import Listener
from orchestrator.workers.executors.process import ProcessExecutor
from orchestrator.workers.executors.protocol import Gone, Setup, Unequipped, Unreachable
from orchestrator.workers.executors.spool import Spool
from orchestrator.workers.executors.watched import Watched
from orchestrator.workers.running.job import Stage
from tests.integration import executing
from tests.integration.executing import Driver, Heard, Reports
from tests.waiting import eventually

PYTHON = [sys.executable, "-S", "-E", "-c"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of executions."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def execution(*command: str, **options: Any) -> Execution:
    told = {"name": f"e-{uuid4().hex[:8]}", "task": "shop.resize", "task_id": "t-1", "attempt": 2, "queue": "default"}
    return executing.execution(Process(command=list(command), **options), input={"width": 3}, **told)


def tell(story: Callable[[ProcessExecutor], Awaitable[Any]], *commands: str) -> Any:
    """Run an async test body with an executor that allows some programs."""
    setup = Setup(settings=load_settings(environ={}), worker="w", commands=commands or ("*",))
    return Driver(lambda: ProcessExecutor(setup)).drive(story)


def outcome(work: Execution, *commands: str) -> Outcome:
    async def story(executor: ProcessExecutor) -> Outcome:
        found = await executor.watch(work, await executor.submit(work), Heard())
        await executor.release(work, "")
        return found

    ended: Outcome = tell(story, *commands)
    return ended


def output(work: Execution) -> Any:
    found = outcome(work)
    assert isinstance(found, Finished), found
    return found.output


def test_commands_get_only_the_declared_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_SECRET_KEY", "hidden")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = output(execution(*PYTHON, program, env={"COLOUR": "grün", "HOME": "/nowhere"}))
    assert "ORCHESTRATOR_SECRET_KEY" not in seen
    known = {"COLOUR": "grün", "HOME": "/nowhere", "TASK_NAME": "shop.resize", "TASK_ID": "t-1", "TASK_ATTEMPT": "2"}
    assert {name: seen.get(name) for name in known} == known
    passed_on = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PWD", "SHLVL", "_"}
    assert {name for name in set(seen) - set(known) - passed_on if not name.startswith("TASK_")} == set()


def test_the_input_is_passed_as_a_file_and_on_stdin() -> None:
    program = "import json, os; print(json.dumps(json.load(open(os.environ['TASK_SPEC_PATH']))['input']))"
    assert output(execution(*PYTHON, program)) == {"width": 3}
    assert output(execution("/bin/cat")) == {"width": 3}


def test_commands_run_in_the_given_or_a_private_folder(tmp_path: Path, folder: Path) -> None:
    assert output(execution("/bin/pwd", cwd=str(tmp_path), output="text")).strip() == str(tmp_path)
    assert output(execution("/bin/pwd", output="text")).startswith(str(folder / "orchestrator-executions-"))
    missing = outcome(execution("/bin/pwd", cwd=str(tmp_path / "none")))
    assert isinstance(missing, Broken)
    assert "126" in missing.message
    assert "none" in missing.detail


def test_arguments_are_passed_unchanged() -> None:
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    words = ["a b", "$HOME", "*", "`id`", "", "--", "ä\n"]
    assert output(execution(*PYTHON, program, *words)) == words


def test_commands_do_not_inherit_the_keepers_descriptors() -> None:
    program = "import json, os; print(json.dumps({n: os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2, 3)}))"
    found = outcome(execution(*PYTHON, program))
    assert isinstance(found, Broken)
    assert "/proc/self/fd/3" in found.detail, "there is no such descriptor"


def test_the_memory_limit_is_enforced() -> None:
    program = "print(len(bytearray(300_000_000)))"
    assert output(execution(*PYTHON, program)) == 300_000_000
    found = outcome(execution(*PYTHON, program, memory=150_000_000))
    assert isinstance(found, Broken)
    assert (found.kind, "MemoryError" in found.detail) == ("ExitCode", True)


def test_the_cpu_limit_ends_the_command() -> None:
    found = outcome(execution("/bin/sh", "-c", "while :; do :; done", cpu=1))
    assert isinstance(found, Broken)
    assert (found.kind, found.message) == (
        "Killed",
        "The command was ended by SIGXCPU: it used up its processor time, of which each process gets 1 s (option cpu).",
    )


def test_a_command_that_ignores_the_cpu_limit_is_killed() -> None:
    found = outcome(execution("/bin/sh", "-c", "trap '' XCPU; while :; do :; done", cpu=1))
    assert isinstance(found, Broken)
    assert (found.kind, found.message) == ("Killed", "The command was ended by SIGKILL.")


def test_the_limit_of_open_files_is_enforced() -> None:
    program = "files = [open('/dev/null') for _ in range(100)]"
    found = outcome(execution(*PYTHON, program, files=50))
    assert isinstance(found, Broken)
    assert "Too many open files" in found.detail


@pytest.mark.parametrize(
    ("retry_on", "code", "expected"), [(None, 1, True), ([75], 75, True), ([75], 1, False), ([], 1, False)]
)
def test_retry_on_selects_the_retryable_exit_codes(retry_on: list[int] | None, code: int, expected: bool) -> None:
    found = outcome(execution("/bin/sh", "-c", f"echo why >&2; exit {code}", retry_on=retry_on))
    assert found == Broken("ExitCode", f"The command ended with exit code {code}.", expected, "why")


@pytest.mark.parametrize("program", ["/bin/cat", "cat", "/usr/bin/../bin/true", "/usr/bin/true "])
def test_disallowed_programs_are_rejected(program: str) -> None:
    with pytest.raises(GiveUp, match="may not run .* --allow-command"):
        outcome(execution(program), "/usr/bin/true", "/opt/jobs/*", "/usr/bin/../*")


def test_a_pattern_allows_one_folder_without_links_leading_out(tmp_path: Path) -> None:
    jobs, within = tmp_path / "jobs", tmp_path / "jobs" / "within"
    within.mkdir(parents=True)
    (tmp_path / "linked").symlink_to(jobs)
    for place in (jobs / "own", within / "other", tmp_path / "beside"):
        place.write_text("#!/bin/sh\necho 1\n")
        place.chmod(0o700)
    (jobs / "newest").symlink_to("own")
    (jobs / "out").symlink_to(tmp_path / "beside")
    pattern = str(jobs / "*")
    for program in ("own", "newest"):
        assert outcome(execution(str(jobs / program)), pattern) == Finished(1)
        assert outcome(execution(str(tmp_path / "linked" / program)), str(tmp_path / "linked" / "*")) == Finished(1)
    with pytest.raises(GiveUp, match="may not run .*other.* it allows"):
        outcome(execution(str(within / "other")), pattern)
    with pytest.raises(GiveUp, match="may not run .*out', which leads to .*beside; it allows"):
        outcome(execution(str(jobs / "out")), pattern)
    for allowed in ("*", str(jobs / "out")):
        assert outcome(execution(str(jobs / "out")), pattern, allowed) == Finished(1)
    assert outcome(execution(str(within / "other")), str(jobs / "*" / "*")) == Finished(1)


def test_a_worker_without_allowed_programs_rejects_all() -> None:
    with pytest.raises(GiveUp, match="it allows no program"):
        outcome(execution("/bin/true"), "")


def test_a_missing_program_is_named() -> None:
    with pytest.raises(Unequipped, match="there is no program '/opt/none'"):
        outcome(execution("/opt/none"))


FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, {handler})
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", child])
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_a_cancel_ends_all_processes_of_a_command(handler: str, folder: Path) -> None:
    async def story(executor: ProcessExecutor) -> list[int]:
        work = execution(*PYTHON, FAMILY.format(handler=handler), grace=0.3)
        id = await executor.submit(work)
        [stdout] = folder.glob("*/*/stdout")
        while len(pids := stdout.read_text().split()) < 2:
            await asyncio.sleep(0.01)
        await executor.cancel(work, id)
        await executor.release(work, id)
        assert not stdout.exists()
        return [int(pid) for pid in pids]

    for pid in tell(story):
        eventually(lambda pid=pid: not _is_alive(pid), f"{pid} has ended")  # type: ignore[misc]


def _is_alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_background_processes_end_with_their_command() -> None:
    left = int(output(execution("/bin/sh", "-c", "sleep 600 >/dev/null & echo $!", output="text")))
    eventually(lambda: not _is_alive(left), f"the end of process {left}")


SERVICE = """
import os, sys
from orchestrator.environment import forbid_inspection, hide_environment
hide_environment()
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
forbid_inspection(sys.argv[3] == "forbidden")
print(os.environ["SECRET_KEY"], flush=True)
sys.stdin.read()
"""

THIEF = """
import ctypes, json, os, sys
seen = {}
for name in ("environ", "mem"):
    try:
        seen[name] = open(f"/proc/{sys.argv[1]}/{name}", "rb").read(100_000).decode(errors="replace")
    except OSError as error:
        seen[name] = error.strerror
print(json.dumps({"seen": seen, "user": os.getuid(), "home": os.environ["HOME"], "cwd": os.listdir("."),
    "spec": len(open(os.environ["TASK_SPEC_PATH"]).read()), "made": os.mkdir("own")}))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="becomes another user")
@pytest.mark.parametrize("inspection", ["forbidden", "allowed"])
def test_a_command_cannot_read_the_secrets_of_its_worker(inspection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(nobody.pw_uid), str(nobody.pw_gid), inspection],
            env={**os.environ, "SECRET_KEY": "hidden words"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as service,
    ):
        assert service.stdout is not None
        assert service.stdin is not None
        assert service.stdout.readline() == b"hidden words\n", "it has its variables"
        Path(folder).chmod(0o755)
        monkeypatch.setattr("tempfile.tempdir", folder)
        found = output(execution("/usr/bin/python3", "-c", THIEF, str(service.pid), user="nobody"))
        service.stdin.close()
    seen = found.pop("seen")
    assert found.pop("spec") > 0
    assert found == {"user": nobody.pw_uid, "home": nobody.pw_dir, "cwd": [], "made": None}
    assert "hidden words" not in seen["environ"]
    assert ("PATH=" in seen["environ"]) == (inspection == "allowed")
    assert seen["mem"] == "Permission denied" or inspection == "allowed"


def test_an_unknown_user_fails_the_attempt() -> None:
    """Returning the task instead would keep the program from all other tasks."""
    with pytest.raises(ConfigurationError, match="there is no user 'nosuchuser' on machine "):
        output(execution("/usr/bin/id", user="nosuchuser"))


def test_log_lines_arrive_while_the_command_runs() -> None:
    work = execution(*PYTHON, LISTENER)

    async def told(executor: ProcessExecutor) -> list[str]:
        heard, id = Heard(), await executor.submit(work)
        watching = asyncio.create_task(executor.watch(work, id, heard))
        while not heard.lines:
            await asyncio.sleep(0.01)
        assert not watching.done()
        (executor._spool(work).folder / "work" / "go").touch()
        assert await watching == Finished(5)
        return heard.lines

    assert tell(told) == ["info: one", "info: two"]


LISTENER = """
import os, sys, time
print("one", file=sys.stderr, flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("two", file=sys.stderr)
print(5)
"""


def test_a_progress_bar_is_logged_while_it_is_redrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "_PROGRESS_INTERVAL", 3_600.0)
    spool = Spool(tmp_path, "x-1")
    spool.folder.mkdir()

    def said(data: bytes) -> str | None:
        with spool.stderr.open("ab") as file:
            file.write(data)
        return spool.new_lines()

    assert said(b"begins\r\n10%\r20%\r30") == "begins\n20%"
    assert said(b"%\r40%\r") is None, "its time is not over"
    monkeypatch.setattr(spools, "_PROGRESS_INTERVAL", 0.0)
    assert said(b"50%\r") == "50%", "only how it stands"
    assert said(b"\nsaved\r\n60%") == "saved", "what ends the bar is no line"
    assert spool.new_lines(is_last=True) == "60%"


def test_a_long_line_is_redacted_and_logged_in_pieces() -> None:
    told: list[str] = []
    job = SimpleNamespace(stage=Stage.RUNNING, secrets=("secret",), dispatch=SimpleNamespace(attempt=1))
    outbox = SimpleNamespace(log_lines=lambda _, lines: told.extend(lines.text.split("\n")))
    line = "x" * 9_998 + "secret" + "y" * 15_000
    listener = Listener(cast("Any", job), cast("Any", outbox), cast("Any", None))
    listener.log(f"{line}\n\nshort")
    assert told[-2:] == ["", "short"]
    assert [len(piece) for piece in told[:-3]] == [10_000, 10_000]
    assert "".join(told[:-2]) == line.replace("secret", HIDDEN)


def test_a_second_watcher_gets_only_the_remaining_lines() -> None:
    work = execution(*PYTHON, LISTENER)

    async def first(executor: ProcessExecutor) -> str:
        heard, id = Heard(), await executor.submit(work)
        watching = asyncio.create_task(executor.watch(work, id, heard))
        while not heard.lines:
            await asyncio.sleep(0.01)
        watching.cancel()
        return id

    async def second(executor: ProcessExecutor) -> list[str]:
        heard = Heard()
        (executor._spool(work).folder / "work" / "go").touch()
        assert await executor.submit(work) == known, "it is found, and not started again"
        assert await executor.watch(work, known, heard) == Finished(5)
        return heard.lines

    known: str = tell(first)
    assert tell(second) == ["info: two"]


def test_no_line_is_logged_twice_after_a_watcher_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly a watcher killed while writing its offset left an empty file, and the next watcher started over."""
    Spool(tmp_path, "e").prepare(b"", b"")
    with (tmp_path / "e" / "stderr").open("w") as stderr:
        print("one", file=stderr)
    assert Spool(tmp_path, "e").new_lines() == "one"
    with (tmp_path / "e" / "stderr").open("a") as stderr:
        print("two", file=stderr)

    def be_killed(path: Path, _: str) -> int:
        path.open("w").close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", be_killed)
        Spool(tmp_path, "e").new_lines()
    later = Spool(tmp_path, "e")
    assert (later.new_lines(), later.new_lines()) == ("two", None)


def test_an_execution_cancelled_before_its_start_never_starts(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def story(executor: ProcessExecutor) -> None:
        work = execution("/usr/bin/touch", str(mark))
        await executor.cancel(work, "")
        id = await executor.submit(work)
        with pytest.raises(Gone):
            await executor.watch(work, id, Heard())
        await executor.cancel(work, id)

    tell(story)
    assert not mark.exists()


def test_a_machine_without_free_descriptors_is_unreachable() -> None:
    """A machine without free descriptors is no failure of the task."""

    async def story(executor: ProcessExecutor) -> Outcome:
        work = execution("/bin/echo", "5")
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        await executor._call(lambda: None)  # starts the executor's threads
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            with pytest.raises(Unreachable, match="Too many open files"):
                await executor.submit(work)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        return await executor.watch(work, await executor.submit(work), Heard())

    assert tell(story) == Finished(5)


def test_a_full_disk_hands_the_task_back_and_leaves_no_folder() -> None:
    async def story(executor: ProcessExecutor) -> Outcome:
        work = execution("/bin/echo", "5")
        spool = Spool(executor._root, work.name)
        spool.folder.mkdir()
        (spool.folder / ".input").symlink_to("/dev/full")
        with pytest.raises(Unequipped, match="No space left on device"):
            await executor.submit(work)
        assert not spool.folder.exists()
        return await executor.watch(work, await executor.submit(work), Heard())

    assert tell(story) == Finished(5)


def test_a_full_disk_does_not_end_the_watch_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def story(executor: ProcessExecutor) -> Outcome:
        work = execution("/bin/sh", "-c", "echo said >&2; echo 5")
        id = await executor.submit(work)
        with monkeypatch.context() as patch, pytest.raises(Unreachable, match="No space left on device"):
            patch.setattr(Spool, "_write_number", write)
            await executor.watch(work, id, Heard())
        return await executor.watch(work, id, Heard())

    assert tell(story) == Finished(5)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_the_driver_hands_a_task_back_whose_executor_finds_no_room(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_root(_: str) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("orchestrator.workers.executors.process.open_root", open_root)
    reports, ignore = Reports(), SimpleNamespace(ended=lambda *_: None)
    runner: Any = SimpleNamespace(ended=lambda *_: None, failures=SimpleNamespace(failure=lambda _, error: error))
    job: Any = SimpleNamespace(
        **{"begin": lambda _: True, "interruptible": lambda _: None, "finish": lambda: True, "fields": {}},
        uninterruptible=lambda: None,
        options=SimpleNamespace(executor=ExecutorCall("process", {}, "process /bin/echo")),
        dispatch=SimpleNamespace(id=b"", attempt=1),
    )
    parts: Any = runner, None, reports, ignore, Setup(settings=load_settings(environ={}), worker="w"), 1
    asyncio.run(driving.Driver(*parts).drive(job))
    assert [type(report) for report in reports.made] == [Returned]


def test_the_specification_names_its_task_and_attempt() -> None:
    said = output(execution("/bin/sh", "-c", 'cat "$TASK_SPEC_PATH"'))
    assert (said["task"], said["attempt"]) == ("shop.resize", 2), json.dumps(said)


@pytest.mark.parametrize(("kind", "expected"), [("text", ""), ("json", None), ("last_line", None), ("none", None)])
def test_a_command_may_print_nothing(kind: str, expected: str | None) -> None:
    assert output(execution("/bin/true", output=kind)) == expected


@pytest.mark.parametrize("levels", [300, 50_000])
def test_too_deeply_nested_output_fails_the_attempt(levels: int) -> None:
    found = outcome(execution(*PYTHON, f"print('[' * {levels} + ']' * {levels})"))
    assert isinstance(found, Broken)
    assert (found.kind, found.retryable) == ("UnreadableOutput", False)


def test_an_input_with_nan_is_rejected() -> None:
    work = dataclasses.replace(execution("/bin/true"), input={"mean": float("nan")})
    with pytest.raises(PayloadError, match="task 'shop.resize' is sent as JSON.* found nan at `mean`"):
        outcome(work)


def test_a_second_watcher_finds_a_command_in_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = execution(*PYTHON, LISTENER)

    async def first(executor: ProcessExecutor) -> str:
        return await executor.submit(work)

    async def second(executor: ProcessExecutor) -> Outcome:
        assert not executor._spool(work).folder.exists()
        found = executor._spool(work, known).folder
        eventually(lambda: b"one" in (found / "stderr").read_bytes(), "it has begun")
        found.parent.rename(folder / "unmounted")
        with pytest.raises(Unreachable, match="cannot be reached from here"):
            await executor.watch(work, known, Heard())
        (folder / "unmounted").rename(found.parent)
        (found / "work" / "go").touch()
        ended = await executor.watch(work, known, Heard())
        await executor.release(work, known)
        assert not found.exists()
        return ended

    known: str = tell(first)
    (folder / "another").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "another"))
    assert tell(second) == Finished(5)


def test_an_external_id_with_a_foreign_folder_is_ignored(folder: Path) -> None:
    async def story(executor: ProcessExecutor) -> None:
        work = execution("/bin/true")
        own = executor._spool(work).folder
        assert executor._spool(work, f"host 1 1 {folder}/elsewhere/{work.name}").folder == own
        assert executor._spool(work, f"host 1 1 {own}/../../x").folder == own
        assert executor._spool(work, "host 1 1").folder == own

    tell(story)


def test_endless_output_is_stopped_while_it_is_written(folder: Path) -> None:
    found = outcome(execution("/bin/sh", "-c", "yes & yes"))
    assert isinstance(found, Broken)
    assert (found.kind, found.retryable) == ("OutputTooLarge", False)
    assert output(execution("/bin/sh", "-c", "head -c 3000000 /dev/zero", output="none")) is None


CHATTERER = """
import os, sys, time
print("first", file=sys.stderr, flush=True)
for _ in range(600):
    os.write(2, b"x" * 99_999 + b"\\n")
while os.fstat(2).st_size > 16_000_000:
    time.sleep(0.01)
print("last", file=sys.stderr)
print(5)
"""


TALKER = """
import sys, time
for number in range(20_000):
    print("line", number, "of many that are written at once", file=sys.stderr)
sys.stderr.flush()
while True:
    time.sleep(0.1)
"""


def test_a_burst_of_lines_is_logged_while_the_command_runs(folder: Path) -> None:
    work = execution(*PYTHON, TALKER)

    async def story(executor: ProcessExecutor) -> None:
        heard = Heard()
        external_id = await executor.submit(work)
        watching = asyncio.create_task(executor.watch(work, external_id, heard))
        async with asyncio.timeout(60):
            while len(heard.lines) < 20_000:
                await asyncio.sleep(0.02)
        await executor.cancel(work, external_id)
        await watching

    tell(story)


def test_the_timeout_stops_at_exit_and_lines_stay_whole(folder: Path) -> None:
    count = 200_000
    work = execution(*PYTHON, f"import sys; [print('line', n, 'of many', file=sys.stderr) for n in range({count})]")
    job = SimpleNamespace(stage=Stage.RUNNING, secrets=(), dispatch=SimpleNamespace(attempt=1))

    async def story(executor: ProcessExecutor) -> list[str]:
        external_id, told = await executor.submit(work), list[str]()
        while executor._spool(work).exit_code() is None:
            await asyncio.sleep(0.02)
        async with asyncio.timeout(60) as limit:

            def log_lines(_: Any, lines: LogLine) -> None:
                assert limit.when() is None, "its time goes on"
                told.extend(lines.text.split("\n"))

            listener = Listener(cast("Any", job), cast("Any", SimpleNamespace(log_lines=log_lines)), limit)
            assert await executor.watch(work, external_id, listener) == Finished(None)
        return told

    assert tell(story) == [f"line {number} of many" for number in range(count)]


def test_the_task_timeout_ends_with_the_command_not_its_log() -> None:
    """Formerly the task failed with TaskTimeout although its command had exited with 0."""

    class Slow:
        options = Process

        async def submit(self, _: Execution) -> str:
            return "here"

        async def watch(self, _: Execution, __: str, watcher: Listener) -> Outcome:
            watcher.ended()
            await asyncio.sleep(1.5)  # the time to pass on the log lines
            return Finished("done")

    assert asyncio.run(executing.watched_to_the_end(Slow(), execution("/bin/true"), timeout=1.0)) == "done"


def test_stderr_on_disk_is_bounded_and_dropped_bytes_are_counted(folder: Path) -> None:
    work = execution(*PYTHON, CHATTERER)

    async def story(executor: ProcessExecutor) -> list[str]:
        heard = Heard()
        assert await executor.watch(work, await executor.submit(work), heard) == Finished(5)
        return heard.lines

    *lines, last = tell(story)
    assert (lines[0], lines[-1]) == ("info: first", "info: last")
    told = sum(len(line.removeprefix("info: ")) + 1 for line in lines)
    counted = re.fullmatch("warning: at least ([\\d,]+) bytes of stderr were dropped: they came too fast", last)
    assert counted is not None, last
    assert 0 <= 60_000_000 + 11 - told - int(counted[1].replace(",", "")) < 20_000_000, "what came during a cut"


def test_many_short_lines_are_sent_in_blocks_off_the_event_loop() -> None:
    count = 300_000
    work = execution("/bin/sh", "-c", f"yes 'an error\n\ny' | head -n {3 * count} >&2; exit 3")
    threads: list[str] = []

    class Counting(Heard):
        def log(self, line: str, *, level: str = "info") -> None:
            threads.append(threading.current_thread().name)
            super().log(line, level=level)

    async def story(executor: ProcessExecutor) -> list[str]:
        heard = Counting()
        assert isinstance(await executor.watch(work, await executor.submit(work), heard), Broken)
        return heard.lines

    lines = tell(story)
    assert lines == ["warning: an error", "info: ", "info: y"] * count
    assert len(threads) < 100, "the cost goes with the blocks, and not with the lines"
    assert all(name.startswith("process") for name in threads)


def test_the_output_of_a_cancelled_command_is_logged() -> None:
    program = f"{LISTENER[: LISTENER.index('while')]}os.write(2, b'y' * 9 + b'\\n' * 30_000_000); time.sleep(600)"
    work = execution(*PYTHON, program)

    async def story(executor: ProcessExecutor) -> None:
        heard, id = Heard(), await executor.submit(work)
        stderr = executor._spool(work).stderr
        while stderr.stat().st_size < 30_000_000:
            await asyncio.sleep(0.01)
        await executor.cancel(work, id)
        await executor.drain_output(work, id, heard)
        *lines, last = heard.lines
        assert lines[:2] == ["info: one", "info: yyyyyyyyy"]
        left_out = stderr.stat().st_size - sum(len(line.removeprefix("info: ")) + 1 for line in lines)
        assert last == f"warning: at least {left_out:,} bytes of stderr were dropped: they came too fast"

    tell(story)


def test_the_driver_drains_the_output_after_a_cancel() -> None:
    done: list[Any] = []

    class FakeExecutor:
        async def cancel(self, *_: Any) -> None:
            done.append("ended")

        async def drain_output(self, *heard: Any) -> None:
            done.append(heard[-1])

    async def story(executor: ProcessExecutor) -> None:
        setup = Setup(settings=load_settings(environ={}), worker="w")
        parts = [cast("Any", None)] * 4
        watched = Watched(
            parts[0],
            cast("Any", FakeExecutor()),
            execution("/bin/true"),
            Record(name="e", attempt=1, failures=0, since=0.0),
        )
        watched.listener = cast("Any", "listener")
        await driving.Driver(parts[0], parts[1], parts[2], parts[3], setup, 1)._cancel(watched)
        assert done == ["ended", "listener"]

    tell(story)


def test_a_process_that_writes_after_the_end_delays_nothing() -> None:
    program = "setsid sh -c 'echo $$; exec yes >&2' & sleep 0.2"
    work = execution("/bin/sh", "-c", program, output="text")
    writer = int(output(work))
    os.kill(writer, signal.SIGKILL)


@pytest.mark.parametrize("how", ["watch", "cancel"])
def test_a_command_with_a_killed_keeper_ends_before_the_next_attempt(how: str) -> None:
    work = execution("/bin/sh", "-c", "trap '' TERM; echo $$; sleep 600 & wait; wait", grace=0.2)

    async def story(executor: ProcessExecutor) -> int:
        id = await executor.submit(work)
        spool = executor._spool(work)
        while not spool.stdout.read_text().endswith("\n"):
            await asyncio.sleep(0.01)
        keeper = spool.keeper()
        assert keeper is not None
        os.kill(keeper.pid, signal.SIGKILL)
        if how == "cancel":
            await executor.cancel(work, id)
        else:
            with pytest.raises(Gone, match="was killed"):
                await executor.watch(work, id, Heard())
        assert keeper.left_behind() == []
        return int(spool.stdout.read_text())

    assert not _is_alive(tell(story)), "it has ended before anybody is told that it is gone"


def test_files_of_a_killed_keeper_are_removed_after_a_day() -> None:
    async def story(executor: ProcessExecutor) -> None:
        old, young, runs = (execution("/bin/sleep", "600") for _ in range(3))
        for work in (old, young, runs):
            await executor.submit(work)
            keeper = executor._spool(work).keeper()
            assert keeper is not None
            if work is not runs:
                keeper.signal_group(signal.SIGKILL)
                eventually(lambda keeper=keeper: not keeper.left_behind(), "it has ended")  # type: ignore[misc]
            if work is not young:
                folder = executor._spool(work).folder
                for path in (*folder.iterdir(), folder):
                    os.utime(path, (time.time() - 90_000,) * 2)
        spools.sweep(executor._root)
        assert [executor._spool(work).folder.exists() for work in (old, young, runs)] == [False, True, True]
        await executor.cancel(runs, await executor.submit(runs))

    tell(story)


def test_files_of_a_killed_worker_are_removed_after_a_day() -> None:
    async def story(executor: ProcessExecutor) -> None:
        old, young = execution("/bin/true"), execution("/bin/true")
        for work in (old, young):
            await executor.watch(work, await executor.submit(work), Heard())
        os.utime(executor._spool(old).folder / "end", (time.time() - 90_000,) * 2)
        executor._swept -= 4_000
        await executor.submit(execution("/bin/true"))
        assert not executor._spool(old).folder.exists()
        assert executor._spool(young).folder.exists()

    tell(story)
