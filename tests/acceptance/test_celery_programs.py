"""Typical Celery programs with only their imports changed print the same as with Celery 5.5 and Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.stack import HERE, Stack
from tests.forking import FORKING
from tests.waiting import eventually

PROGRAMS = HERE / "celery_programs"

EXPECTED = {
    "signalled": """\
['acme', 'signalled.whose']
welcome, ann, by mail ["prerun signalled.mail_welcome ['ann']", 'success welcome, ann, by mail', 'postrun SUCCESS']
published: 1
steady ['prerun signalled.shaky []', 'retry 0', 'postrun RETRY', 'prerun signalled.shaky []', 'success steady', \
'postrun SUCCESS']
KeyError('x') ['prerun signalled.broken []', "failure KeyError('x')", 'postrun FAILURE']
processes: True
revoked: ['revoked signalled.sleepy']
pong: [[{'ok': 'pong'}]]
registered: True
again: welcome, ann, by mail SUCCESS
by name: welcome, bob, by mail
""",
    "periodic": "ticked: [True, True, True, True] 0 None None\n",
}
IN_DJANGO = """\
invoiced: 9.90
chain: thank you for 9.90, ann
count: 1
missing: DoesNotExist
"""


@pytest.fixture
def programs(stack: Stack) -> Stack:
    """Services; a program names the Redis itself, as its broker."""
    stack.environment["REDIS_URL"] = stack.environment.pop("ORCHESTRATOR_REDIS_URL")
    stack.environment["SQLITE"] = str(stack.folder / "db.sqlite3")
    return stack


def serve(stack: Stack, app: str, *options: str, folder: Path = PROGRAMS) -> None:
    """Start a scheduler and a worker with Celery's commands."""
    beat = stack._start("scheduler", ["celery", "-A", app, "beat"], folder)
    eventually(lambda: beat.logged("scheduler.ready"), f"scheduler ready, see {beat.log}")
    words = ["celery", "-A", app, "worker", "-c", "2", "-P", "threads", "-l", "INFO", *options]
    worker = stack._start("worker", words, folder)
    eventually(lambda: worker.logged("process.ready"), f"worker ready, see {worker.log}")


def run(stack: Stack, *words: str, folder: Path = PROGRAMS) -> str:
    done = FORKING.run(*words, environment=stack.environment, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_prints_the_same_as_with_celery(programs: Stack, name: str) -> None:
    serve(programs, name, "-Q", "celery,mail")
    assert run(programs, "-c", f"import {name}; {name}.main()") == EXPECTED[name]


def test_a_django_project_prints_the_same_as_with_celery(programs: Stack) -> None:
    project = PROGRAMS / "django_project"
    run(programs, "manage.py", "migrate", "--run-syncdb", folder=project)
    serve(programs, "mysite", folder=project)
    assert run(programs, "place.py", folder=project) == IN_DJANGO


def test_the_celery_commands_work(programs: Stack) -> None:
    serve(programs, "signalled", "-P", "prefork", "-Q", "celery,mail", "-n", "w1@%h", "--max-tasks-per-child", "100")

    def celery(*words: str) -> str:
        return run(programs, "-m", "orchestrator", "celery", "-A", "signalled", *words).strip()

    assert celery("status").endswith("1 node online.")
    called = celery("call", "signalled.mail_welcome", "--args", '["bob"]')
    assert celery("result", called) == "welcome, bob, by mail"
    assert '"max-concurrency": 2' in celery("inspect", "stats")
    assert "signalled.whose" in celery("inspect", "registered")
    assert celery("purge", "-f").startswith("Purged ")
