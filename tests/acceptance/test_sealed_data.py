"""With data keys, a copy of Postgres and of Redis has no arguments, results, errors or log lines of tasks."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import vaulted

from orchestrator import Settings, TaskFailed
from orchestrator.executors import Process
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sealing import vault_of
from tests import forking
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack, using
from tests.forking import FORKING
from tests.waiting import eventually

MARK = "xyzzy-PLUGH"
FIRST = f"first:{base64.b64encode(b'1' * 32).decode()}"
WORKER = ("--app", "vaulted:app", "--database")
DAG = """
name: dag
params: {word: {type: string}}
on_failure: [{task: vaulted.ended}]
tasks:
  one:  {task: vaulted.keep, input: {text: "${params.word}"}}
  each: {task: vaulted.keep, depends_on: [one], foreach: one.list, input: {text: "${item}", more: "${one.said}"}}
  some: {task: vaulted.keep, depends_on: [one], when: "${one.said == params.word}", input: {text: "${one.said}"}}
  none: {task: vaulted.keep, depends_on: [one], foreach: one.said, input: {text: "${item}"}}
"""


@pytest.fixture
def sealed(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    """Services without processes, with a data key."""
    with fresh_stack(database_url, redis_url, tmp_path, data_keys=FIRST) as stack, using(vaulted.app, stack):
        yield stack


def forms(text: str) -> list[bytes]:
    """Return a text in the encodings in which a store may hold it."""
    data = text.encode()
    coded = [base64.b64encode(b"\0" * shift + data)[4:-4] for shift in range(3)]
    return [data, data.hex().encode(), *coded]


def dump_postgres(stack: Stack) -> dict[str, str]:
    """Return every row of every table, as text."""
    tables = stack.sql("SELECT table_name FROM information_schema.tables WHERE table_schema = 'orchestrator'")
    return {
        name: "\n".join(str(row) for (row,) in stack.sql(f'SELECT row_to_json(t)::text FROM orchestrator."{name}" t'))
        for (name,) in tables
    }


def dump_redis(stack: Stack) -> dict[str, bytes]:
    """Return every key, as bytes."""
    read: dict[str, Any] = {
        "string": stack.redis.get,
        "hash": stack.redis.hgetall,
        "stream": stack.redis.xrange,
        "set": stack.redis.smembers,
    }
    found: dict[str, bytes] = {}
    for key in stack.redis.scan_iter():
        kind: Any = stack.redis.type(key)
        if kind == b"none":
            continue  # deleted meanwhile
        value = read[kind.decode()](key)
        found[key.decode()] = b"\n".join(_pieces(value))
    return found


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _pieces(pair)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _pieces(item)


def assert_sealed(stack: Stack) -> None:
    assert_sealed_in_postgres(stack)
    for key, data in dump_redis(stack).items():
        for form in forms(MARK):
            assert form not in data, f"in {key}: …{_around(data, form)}…"


def assert_sealed_in_postgres(stack: Stack) -> None:
    for name, text in dump_postgres(stack).items():
        for form in forms(MARK):
            assert form not in text.encode(), f"in table {name}: …{_around(text.encode(), form)}…"


def _around(data: bytes, form: bytes) -> str:
    place = data.index(form)
    return repr(data[max(0, place - 300) : place + 100])


def test_sealed_values_are_readable_only_with_the_keys(sealed: Stack, tmp_path: Path) -> None:
    vaulted.app.workflows.apply(loads(DAG))
    kept = vaulted.keep.options(on_success=vaulted.follow).enqueue(MARK)
    failing = vaulted.fail.enqueue(MARK)
    dag = vaulted.app.workflows["dag"].start(word=MARK)
    code = vaulted.flow.start(MARK)
    broken = vaulted.breaks.start(MARK)
    stuck = vaulted.sticks.start(MARK)
    assert_sealed(sealed)  # while they are queued

    scheduler, worker = sealed.scheduler(), sealed.worker(*WORKER)
    started, go = tmp_path / "started", tmp_path / "go"
    held = vaulted.hold.enqueue(str(started), str(go), MARK)
    assert kept.result(60) == {"said": MARK, "list": [MARK, MARK]}
    with pytest.raises(TaskFailed, match=MARK) as failure:
        failing.result(60)
    assert failure.value.data == {"known": MARK}
    eventually(started.exists, "a task runs")
    assert vaulted.in_transaction.enqueue(MARK).result(60) == MARK
    spawned = vaulted.app.workflow_run(vaulted.spawn.enqueue(MARK).result(60))
    for run in (code, spawned):
        assert run.query("word") == MARK
        assert run.update("tell", MARK) == MARK + MARK
        run.signal("mail", MARK)
        run.reject("broken", MARK)
        run.resolve("word", MARK)
    assert_sealed(sealed)  # while they run

    go.touch()
    assert held.result(60) == MARK
    for run in (code, spawned):
        said, failed, mail, promised, child = run.result(60)
        assert (said, mail, promised, child) == (MARK, MARK, MARK, MARK)
        assert failed.count(MARK) == 3
    with pytest.raises(Exception, match=MARK):
        broken.result(60)
    eventually(lambda: stuck.status() == "stuck", "its code cannot go on")
    eventually(lambda: dag.status() == "failed", "one step cannot be evaluated")
    sealed.redis.xadd("{orchestrator:0}:quarantine", {"d": b"x"})
    assert_sealed(sealed)  # and when they have ended

    assert MARK in sealed.output_of("tasks", "show", kept.id)
    assert MARK in sealed.output_of("tasks", "show", failing.id)
    assert MARK in sealed.output_of("tasks", "logs", kept.id)
    assert MARK in sealed.output_of("runs", "show", dag.id, "--json")
    assert MARK in sealed.output_of("runs", "history", code.id)
    assert MARK in sealed.output_of("runs", "show", broken.id)
    follower = sealed.scalar("SELECT id::text FROM orchestrator.ended_tasks WHERE name = 'vaulted.follow'")
    assert vaulted.app.handle(follower).result(60) == MARK
    noted = sealed.scalar("SELECT id::text FROM orchestrator.ended_tasks WHERE name = 'vaulted.note' LIMIT 1")
    message, data = vaulted.app.handle(noted).result(60)
    assert MARK in message
    assert data == {"known": MARK}
    api = sealed.api()
    task = httpx.get(f"{api}/api/v1/tasks/{kept.id}").json()
    assert MARK in json.dumps(task["args"]) + json.dumps(task["result"])
    assert MARK in httpx.get(f"{api}/api/v1/tasks/{failing.id}").text
    for process in (scheduler, worker):
        assert process.is_running()
    assert run_keyless_client(sealed, api) == [MARK, f"odd {MARK}"]
    assert_sealed(sealed)  # including values sent over HTTP


REMOTE = """
import sys
from orchestrator import Orchestrator, TaskFailed
app = Orchestrator(api_url=sys.argv[1])
keep = app.task(name="vaulted.keep")(lambda text: {})
fail = app.task(name="vaulted.fail")(lambda text: {})
print(keep.enqueue(sys.argv[2]).result(60)["said"])
try:
    fail.enqueue(sys.argv[2]).result(60)
except TaskFailed as error:
    print("odd", error.data["known"])
"""


def run_keyless_client(stack: Stack, api: str) -> list[str]:
    """Run a program without keys over HTTP; return the lines that it prints."""
    environment = {name: value for name, value in stack.environment.items() if not name.startswith("ORCHESTRATOR_")}
    done = FORKING.run("-c", REMOTE, api, MARK, environment=environment, folder=stack.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


READING = """
import sys
from orchestrator import Orchestrator, gather
app = Orchestrator()
kept, failed, flow, broken = sys.argv[1:]
print(app.handle(kept).result(60)["said"])
print(gather([app.handle(kept)], timeout=60)[0]["said"])
for handle in (app.handle(failed), app.workflow_run(broken)):
    try:
        handle.result(60)
    except Exception as error:
        print(repr(str(error)), error.data)
print(app.workflow_run(flow).result(60)[0])
"""


LOOKING_AT = """
import json, sys
from orchestrator.cli import main
for number, look in enumerate(json.loads(sys.argv[1])):
    print("---\\n" * (number > 0), end="", flush=True)
    main(look, standalone_mode=False)
"""


def test_a_client_with_keys_reads_values_from_an_api_without_keys(sealed: Stack) -> None:
    vaulted.app.workflows.apply(loads(DAG))
    sealed.scheduler()
    sealed.worker(*WORKER)
    kept, failing, broken = vaulted.keep.enqueue(MARK), vaulted.fail.enqueue(MARK), vaulted.breaks.start(MARK)
    dag = vaulted.app.workflows["dag"].start(word=MARK)
    flow = vaulted.flow.start(MARK)
    flow.update("tell", MARK)
    flow.signal("mail", MARK)
    flow.reject("broken", MARK)
    flow.resolve("word", MARK)
    kept.result(60)
    flow.result(60)
    eventually(lambda: {failing.status(), broken.status(), dag.status()} == {"failed"}, "all of them fail")
    eventually(lambda: kept.logs(), "what it said is kept")
    with_keys(sealed, "")
    api = sealed.api()
    inherited = {name: value for name, value in sealed.environment.items() if not name.startswith("ORCHESTRATOR_")}
    keyless = inherited | {"ORCHESTRATOR_API_URL": api}
    keyed = keyless | {"ORCHESTRATOR_DATA_KEYS": FIRST}

    def run(environment: dict[str, str], *command: str) -> str:
        done = FORKING.run(*command, environment=environment, folder=sealed.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = run(keyed, "-c", READING, kept.id, failing.id, flow.id, broken.id).splitlines()
    assert [MARK in line for line in lines] == [True] * 5, lines
    assert "{'known': 'xyzzy-PLUGH'}" in lines[2]
    looks = [
        ("tasks", "show", kept.id),
        ("tasks", "show", failing.id, "--json"),
        ("tasks", "logs", kept.id),
        ("runs", "show", broken.id),
        ("runs", "show", dag.id, "--json"),
        ("runs", "history", flow.id),
    ]
    for environment, is_read in ((keyed, True), (keyless, False)):
        for look, told in zip(looks, run(environment, "-c", LOOKING_AT, json.dumps(looks)).split("---\n"), strict=True):
            assert (MARK in told) == is_read, f"{look}: {told}"
            assert ("sealed with key first" in told) != is_read, f"{look}: {told}"
            assert "sealed:" not in told, f"{look}: {told}"
    for path in (f"tasks/{kept.id}", f"tasks/{failing.id}", f"runs/{dag.id}", f"runs/{broken.id}"):
        answer = httpx.get(f"{api}/api/v1/{path}").text
        assert "sealed with key first" in answer, answer
        assert "sealed:" not in answer, answer
    with httpx.stream("GET", f"{api}/api/v1/tasks/{failing.id}/events") as events:
        told = "".join(events.iter_text())
    assert "sealed:" not in told, told


# -- missing keys, and key rotation

SECOND = f"second:{base64.b64encode(b'2' * 32).decode()}"
COPYING = """
name: copying
params: {word: {type: string, default: none}}
tasks:
  one: {task: vaulted.said}
  two: {task: vaulted.given, depends_on: [one]}
"""
LOOKING = """
name: looking
tasks:
  one: {task: vaulted.said}
  two: {task: vaulted.given, depends_on: [one], when: "${one == 'x'}"}
"""


def with_keys(stack: Stack, keys: str) -> None:
    """Set the data keys of processes that are started from now on."""
    stack.environment.pop("ORCHESTRATOR_DATA_KEYS", None)
    if keys:
        stack.environment["ORCHESTRATOR_DATA_KEYS"] = keys


def test_a_scheduler_without_keys_copies_values_and_fails_conditions(sealed: Stack) -> None:
    for text in (COPYING, LOOKING):
        vaulted.app.workflows.apply(loads(text))
    sealed.worker(*WORKER)
    with_keys(sealed, "")
    scheduler = sealed.scheduler()
    assert vaulted.keep.enqueue(MARK).result(60)["said"] == MARK
    copying = vaulted.app.workflows["copying"].start(word=MARK)
    looking = vaulted.app.workflows["looking"].start()
    eventually(lambda: copying.status() == "success", "it is copied from step to step")
    eventually(lambda: looking.status() == "failed", "it cannot be looked at")
    with_keys(sealed, FIRST)
    found = sealed.scalar(
        "SELECT id::text FROM orchestrator.ended_tasks WHERE run_id = :id AND step = 'two'", id=copying.id
    )
    assert vaulted.app.handle(found).result(60) == {"one": {"word": "xyzzy-PLUGH"}}
    assert "no data key" in sealed.output_of("runs", "show", looking.id)
    run = vaulted.child.start(MARK)
    assert run.result(60) == MARK
    assert "Traceback" not in scheduler.log.read_text()


def test_a_worker_without_keys_returns_sealed_tasks(sealed: Stack) -> None:
    sealed.scheduler()
    with_keys(sealed, "")
    blind = sealed.worker(*WORKER)
    handle = vaulted.keep.enqueue(MARK)
    eventually(lambda: blind.logged("'first'"), "it says which key it lacks")
    with_keys(sealed, FIRST)
    sealed.worker(*WORKER)
    assert handle.result(60)["said"] == MARK
    assert blind.is_running()


def test_a_task_with_an_unknown_key_blocks_no_task_of_its_name(sealed: Stack) -> None:
    sealed.scheduler()
    worker = sealed.worker(*WORKER)
    with_keys(sealed, SECOND)
    stray = sealed.output_of("enqueue", "vaulted.keep", MARK).split()[-1]
    with_keys(sealed, FIRST)
    eventually(lambda: worker.logged("'second'"), "it says which key it lacks")
    eventually(lambda: "no data key: second" in sealed.output_of("tasks", "show", stray), "it waits for the key")
    assert vaulted.keep.enqueue(MARK).result(60)["said"] == MARK
    status = forking.run("status", environment=sealed.environment, folder=sealed.folder).stdout
    assert "has data key 'second'" in " ".join(status.split())
    assert "transaction" not in status
    with_keys(sealed, f"{FIRST},{SECOND}")
    sealed.worker(*WORKER)
    vault_of(Settings(data_keys=SECOND))
    assert vaulted.app.handle(stray).result(60)["said"] == MARK


@pytest.mark.long
def test_a_killed_key_rotation_resumes_under_load(sealed: Stack) -> None:
    with_keys(sealed, "plain," + FIRST)
    scheduler, worker = sealed.scheduler(), sealed.worker(*WORKER)
    old = [vaulted.keep.enqueue(f"{MARK} {number}") for number in range(300)]
    failing, run = vaulted.fail.enqueue(MARK), vaulted.child.start(MARK)
    waiting = vaulted.flow.start(MARK)
    assert [handle.result(60)["said"] for handle in old[-5:]] == [f"{MARK} {number}" for number in range(295, 300)]
    assert run.result(60) == MARK
    eventually(lambda: failing.status() == "failed", "it fails")
    assert worker.stop() == 0
    assert scheduler.stop() == 0
    with_keys(sealed, f"{SECOND},{FIRST}")
    vault_of(Settings(data_keys=f"{FIRST},{SECOND}"))  # this process opens both keys, and still seals with the first
    sealed.scheduler()
    sealed.worker(*WORKER)
    assert old[0].result(60)["said"] == f"{MARK} 0", "a key that is rotated out still opens"
    rotation = [sys.executable, "-m", "orchestrator", "keys", "rotate-data"]
    killed = subprocess.Popen(rotation, cwd=sealed.folder, env=sealed.environment, stderr=subprocess.DEVNULL)
    eventually(lambda: rows_of(sealed, "second") > 20, "some are sealed anew")
    killed.kill()
    killed.wait()
    load = [vaulted.keep.enqueue(f"{MARK} more {number}") for number in range(50)]  # with the old key
    for _ in range(3):
        subprocess.run(rotation, cwd=sealed.folder, env=sealed.environment, check=False, capture_output=True)
        if not any(form in text for text in dump_postgres(sealed).values() for form in forms_of_key("first")):
            break
    assert [handle.result(60)["said"] for handle in load] == [f"{MARK} more {number}" for number in range(50)]
    subprocess.run(rotation, cwd=sealed.folder, env=sealed.environment, check=True, capture_output=True)
    for name, text in dump_postgres(sealed).items():
        for form in forms_of_key("first"):
            assert form not in text, f"table {name} still needs the old key"
    assert_sealed_in_postgres(sealed)
    with_keys(sealed, SECOND)
    for handle in (old[0], old[150], load[0]):
        assert MARK in sealed.output_of("tasks", "show", handle.id)
    assert MARK in sealed.output_of("tasks", "show", failing.id)
    assert MARK in sealed.output_of("runs", "history", waiting.id)


def forms_of_key(id: str) -> list[str]:
    """Return the forms of a key's id in the dump of a sealed value, after its kind and its length."""
    plain = [kind + bytes([len(id)]) + id.encode() for kind in (b"c", b"v")]
    return [data.hex() for data in plain] + [
        base64.b64encode(b"\0" * shift + data)[4:-4].decode() for data in plain for shift in range(3)
    ]


def rows_of(stack: Stack, id: str) -> int:
    return int(
        stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks WHERE position(:id IN payload) > 0", id=id.encode())
    )


def test_the_input_and_output_of_a_command_are_sealed(sealed: Stack) -> None:
    sealed.scheduler()
    sealed.worker(*WORKER, "--allow-command", "/bin/sh")
    good = Process(command=["/bin/sh", "-c", "tee /dev/stderr"])
    bad = Process(command=["/bin/sh", "-c", "cat >&2; exit 3"])
    done, failed = (vaulted.keep.options(executor=executor).enqueue(text=MARK) for executor in (good, bad))
    assert done.result(60) == {"text": MARK, "more": None}
    with pytest.raises(TaskFailed, match="exit code 3") as caught:
        failed.result(60)
    assert MARK in caught.value.traceback
    eventually(lambda: MARK in sealed.output_of("tasks", "logs", done.id), "who has the key reads what it said")
    assert_sealed(sealed)
