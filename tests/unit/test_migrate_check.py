"""`orchestrator migrate check` reads a project line by line, and never imports it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.compat.celery import Celery, conf, signals
from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.compat.coverage import CELERY, DRAMATIQ, LIBRARIES, RQ, Library, Verdict
from orchestrator.compat.reading import read_project

TASKS = """
    import celery
    import celery.schedules
    from celery import Celery, bootsteps
    from celery.schedules import (
        crontab,
        solar,
    )

    raise SystemExit("it was imported")
    app = Celery("shop", broker="redis://")
    app.conf.broker_url = "redis://x"
    app.conf.update(task_acks_late=True, timezone="UTC")


    @app.task(bind=True, rate_limit="10/s")
    def send(self, order):
        return order


    @celery.shared_task
    def other():
        send.apply_async((1,), serializer="pickle", countdown=3)
        app.control.add_consumer("mail")
"""


def project(folder: Path, **files: str | bytes) -> Path:
    for name, text in files.items():
        data = text if isinstance(text, bytes) else dedent(text).lstrip().encode()
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def found(folder: Path) -> list[tuple[str, str, str]]:
    return [(f"{use.file}:{use.line}", use.what, str(use.verdict)) for use in read_project(folder).uses]


def test_each_use_is_listed_with_its_line_and_verdict(tmp_path: Path) -> None:
    assert found(project(tmp_path, tasks=TASKS)) == [
        ("tasks.py:1", "import celery", "moves"),
        ("tasks.py:2", "import celery.schedules", "moves"),
        ("tasks.py:3", "celery.Celery", "moves"),
        ("tasks.py:3", "celery.bootsteps", "stays"),
        ("tasks.py:5", "celery.schedules.crontab", "moves"),
        ("tasks.py:6", "celery.schedules.solar", "stays"),
        ("tasks.py:10", "Celery(…)", "moves"),
        ("tasks.py:10", "prefork", "changes"),
        ("tasks.py:10", "early acknowledgement", "changes"),
        ("tasks.py:10", "Celery(broker=…)", "changes"),
        ("tasks.py:11", "setting broker_url", "changes"),
        ("tasks.py:12", "setting task_acks_late", "changes"),
        ("tasks.py:12", "setting timezone", "moves"),
        ("tasks.py:15", "task(…)", "moves"),
        ("tasks.py:15", "task(rate_limit=…)", "changes"),
        ("tasks.py:20", "@shared_task", "moves"),
        ("tasks.py:20", "celery.shared_task", "moves"),
        ("tasks.py:22", "apply_async(…)", "moves"),
        ("tasks.py:22", "apply_async(serializer=…)", "changes"),
        ("tasks.py:23", ".add_consumer", "stays"),
    ]


def test_calls_of_tasks_are_found_without_an_import_of_the_library(tmp_path: Path) -> None:
    project(tmp_path, shop__views="from shop.tasks import send\nsend.delay(1)\ntask()\n", shop__tasks=TASKS)
    assert ("shop/views.py:2", "delay(…)", "moves") in found(tmp_path)
    assert [use for use in found(tmp_path) if use[0].startswith("shop/views")] == [
        ("shop/views.py:2", "delay(…)", "moves")
    ]


def test_a_task_class_with_its_own_apply_async_changes(tmp_path: Path) -> None:
    tenants = """
        from celery import Task

        class OfTenant(Task):
            def apply_async(self, args=None, kwargs=None, **options):
                return super().apply_async(args, kwargs, **options)
    """
    assert ("tasks.py:4", "def apply_async(…)", "changes") in found(project(tmp_path, tasks=tenants))


def test_options_that_a_retry_refuses_stay(tmp_path: Path) -> None:
    retrying = """
        from celery import shared_task

        @shared_task(bind=True)
        def poll(self):
            raise self.retry(queue="slow", priority=3, countdown=5)
    """
    assert [use for use in found(project(tmp_path, tasks=retrying)) if "retry" in use[1]] == [
        ("tasks.py:5", "retry(queue=…)", "stays"),
        ("tasks.py:5", "retry(priority=…)", "stays"),
    ]


def test_rq_and_dramatiq_are_recognized(tmp_path: Path) -> None:
    jobs = """
        from rq import Queue, Worker
        from rq_scheduler import Scheduler
        from rq.contrib import legacy
        queue = Queue("mail", connection=None)
        queue.enqueue(print, 1, result_ttl=5, pipeline=None)
    """
    project(
        tmp_path,
        jobs=jobs,
        actors="import dramatiq\n\n@dramatiq.actor\ndef send(): raise dramatiq.Retry\nsend.send_with_options()\n",
    )
    assert found(tmp_path) == [
        ("actors.py:1", "import dramatiq", "moves"),
        ("actors.py:3", "@actor", "moves"),
        ("actors.py:3", "dramatiq.actor", "moves"),
        ("actors.py:4", "dramatiq.Retry", "moves"),
        ("actors.py:5", "send_with_options(…)", "moves"),
        ("jobs.py:1", "rq.Queue", "moves"),
        ("jobs.py:1", "rq.Worker", "stays"),
        ("jobs.py:2", "rq_scheduler.Scheduler", "moves"),
        ("jobs.py:3", "rq.contrib.legacy", "stays"),
        ("jobs.py:4", "Queue(…)", "moves"),
        ("jobs.py:4", "Queue(connection=…)", "changes"),
        ("jobs.py:5", "enqueue(…)", "moves"),
        ("jobs.py:5", "enqueue(result_ttl=…)", "changes"),
        ("jobs.py:5", "enqueue(pipeline=…)", "stays"),
    ]


def test_related_libraries_are_recognized_and_foreign_attributes_ignored(tmp_path: Path) -> None:
    beside = "import django_rq\nfrom django_celery_beat.models import PeriodicTask\nfrom kombu import Queue\n"
    project(tmp_path, tasks="from rq.job import Job\n", beside=beside, spans="span.set_status(1)\n")
    assert found(tmp_path) == [
        ("beside.py:1", "import django_rq", "stays"),
        ("beside.py:2", "django_celery_beat.models.PeriodicTask", "stays"),
        ("beside.py:3", "kombu.Queue", "changes"),
        ("tasks.py:1", "rq.job.Job", "moves"),
    ]
    assert "orchestrator schedules" in read_project(tmp_path).uses[1].note


def test_settings_of_django_and_of_config_modules_are_found(tmp_path: Path) -> None:
    settings = 'CELERY_BROKER_URL = "x"\nCELERY_TASK_ALWAYS_EAGER = True\nDEBUG = True\n'
    project(tmp_path, tasks="from celery import shared_task\n", settings=settings, celeryconfig="broker_url = 'x'\n")
    assert found(tmp_path)[:3] == [
        ("celeryconfig.py:1", "setting broker_url", "changes"),
        ("settings.py:1", "setting broker_url", "changes"),
        ("settings.py:2", "setting task_always_eager", "moves"),
    ]


def test_the_diff_changes_imports_and_can_be_applied(tmp_path: Path) -> None:
    shop = project(tmp_path / "shop", tasks=TASKS, jobs="def late():\n    from rq_scheduler import Scheduler as S\n")
    diff = CliRunner().invoke(main, ["migrate", "check", str(shop), "--diff"]).stdout
    assert subprocess.run(["patch", "-p1"], input=diff.encode(), cwd=shop, check=True, capture_output=True)
    lines = (shop / "tasks.py").read_text().splitlines()
    assert lines[:6] == [
        "import orchestrator.compat.celery as celery",
        "import orchestrator.compat.celery.schedules",
        "import orchestrator.compat.celery as celery",
        "from orchestrator.compat.celery import Celery, bootsteps",
        "from orchestrator.compat.celery.schedules import (",
        "    crontab,",
    ]
    assert lines[11].startswith('app.conf.broker_url = "redis://x"  # used for Redis or Postgres where')
    assert (shop / "jobs.py").read_text().splitlines()[1] == (
        "    from orchestrator.compat.rq.scheduler import Scheduler as S"
    )
    compile((shop / "tasks.py").read_text(), "tasks.py", "exec")


def test_the_score_and_the_counts_are_printed(tmp_path: Path) -> None:
    project(tmp_path, tasks=TASKS)
    told = CliRunner().invoke(main, ["migrate", "check", str(tmp_path)])
    assert told.exit_code == 0
    assert told.stdout.endswith("85 % of 20 uses in 1 file move: 10 moves, 7 changes, 3 stays.\n")
    document = json.loads(CliRunner().invoke(main, ["migrate", "check", str(tmp_path), "--json"]).stdout)
    assert (document["score"], document["files"], len(document["uses"])) == (85, 1, 20)
    assert document["uses"][3] == {
        "file": "tasks.py",
        "line": 3,
        "library": "Celery",
        "what": "celery.bootsteps",
        "verdict": "stays",
        "note": CELERY.names["celery"]["bootsteps"].note,
    }
    empty = CliRunner().invoke(main, ["migrate", "check", str(project(tmp_path / "other", x="import os\n"))])
    assert empty.stdout == "1 file read; Celery, RQ and Dramatiq are not used.\n"


def test_unreadable_files_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    project(
        tmp_path,
        good="# coding: latin-1\nfrom celery import Celery  # é\n".encode("latin-1"),
        broken="def broken(:\n",
        coding="# coding: klingon\n",
        bytes=b'x = "\xff\xfe"\n',
        null=b"a\x00b",
        large=b"#" * 10_000_000,
        nested="(" * 5_000,
        minus="-" * 200_000 + "1",
        sums="+".join("a" * 2_000),
        venv__pyvenv="",
        venv__lib__tasks="from celery import Celery\n",
        **{".hidden__tasks": "from celery import Celery\n"},
    )
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing.py")
    (tmp_path / "notebook.ipynb").write_text("{}")

    told = CliRunner().invoke(main, ["migrate", "check", str(tmp_path), "--json"])

    assert told.exit_code == 1
    document = json.loads(told.stdout)
    assert [use["file"] for use in document["uses"]] == ["good.py"]
    odd = {"broken.py", "coding.py", "bytes.py", "null.py", "large.py", "nested.py", "minus.py"}
    assert {*document["unread"]} - {"sums.py"} == odd
    assert document["unread"]["broken.py"] == "line 1: invalid syntax"
    assert document["score"] == 100 // (1 + len(document["unread"]))
    assert "files could not be read.\n" in CliRunner().invoke(main, ["migrate", "check", str(tmp_path)]).stdout


def test_uses_of_results_and_of_celerys_libraries_are_found(tmp_path: Path) -> None:
    tasks = """
        from billiard.exceptions import SoftTimeLimitExceeded
        from celery.result import allow_join_result
        from kombu import Queue
        result.forget()
        result.graph
        app.backend
        result.get(on_message=print, timeout=3)
    """
    assert found(project(tmp_path, tasks=tasks)) == [
        ("tasks.py:1", "billiard.exceptions.SoftTimeLimitExceeded", "stays"),
        ("tasks.py:2", "celery.result.allow_join_result", "stays"),
        ("tasks.py:3", "kombu.Queue", "changes"),
        ("tasks.py:4", ".forget", "changes"),
        ("tasks.py:5", ".graph", "stays"),
        ("tasks.py:6", ".backend", "stays"),
        ("tasks.py:7", "get(on_message=…)", "stays"),
    ]


def test_waits_in_tasks_and_settings_without_effect_are_found(tmp_path: Path) -> None:
    tasks = """
        from celery import shared_task

        @shared_task(bind=True, soft_time_limit=5)
        def report(self, params):
            self.update_state(task_id=params.get("id"), state="X")
            return other.delay().get(timeout=5)

        def outside():
            return other.delay().get()
    """
    config = "result_extended = True\nenable_utc = False\ntask_soft_time_limit = 5\ntask_track_started = True\n"
    uses = found(project(tmp_path, tasks=tasks, celeryconfig=config))
    assert [use for use in uses if use[2] != "moves"] == [
        ("celeryconfig.py:1", "setting result_extended", "changes"),
        ("celeryconfig.py:2", "setting enable_utc", "changes"),
        ("celeryconfig.py:3", "setting task_soft_time_limit", "changes"),
        ("tasks.py:3", "shared_task(soft_time_limit=…)", "changes"),
        ("tasks.py:5", "update_state(task_id=…)", "stays"),
        ("tasks.py:6", "get() in a task", "stays"),
    ]


@pytest.mark.parametrize("library", [CELERY, RQ, DRAMATIQ], ids=["Celery", "RQ", "Dramatiq"])
def test_names_that_move_can_be_imported_and_names_that_stay_cannot(library: Library) -> None:
    for module, names in library.names.items():
        target = library.modules.get(module)
        if target is None:
            assert all(rule.verdict is Verdict.STAYS for rule in names.values()), module
            if library is RQ:
                for name, rule in names.items():
                    with pytest.raises(ImportError, match=re.escape(f"{module}.{name} is not covered: {rule.note}.")):
                        getattr(importlib.import_module(f"orchestrator.compat.{module}"), name)
            continue
        imported = importlib.import_module(target)
        for name, rule in names.items():
            try:
                there = hasattr(imported, name)
            except ImportError:
                there = False
            is_refused_when_used = name in ("solar", "allow_join_result")
            assert there is (rule.verdict is not Verdict.STAYS) or is_refused_when_used, f"{module}.{name}"


def test_enqueue_options_that_move_are_accepted_by_the_rq_layer() -> None:
    from orchestrator.compat.rq.call import OPTIONS
    from orchestrator.compat.rq.queue import _REFUSED

    for name, rule in RQ.calls["enqueue"].items():
        taken = name in OPTIONS or name in ("connection", "serializer")
        assert taken is (rule.verdict is not Verdict.STAYS), name
    assert {*_REFUSED} <= {name for name, rule in RQ.calls["enqueue"].items() if rule.verdict is Verdict.STAYS}


def test_the_rules_for_celery_agree_with_its_layer() -> None:
    known = {*conf.DEFAULTS, *conf.WITHOUT_EFFECT, *conf.REFUSED}
    assert {*CELERY.settings} <= known
    stay = {name for name, rule in CELERY.settings.items() if rule.verdict is Verdict.STAYS}
    assert stay <= {*conf.REFUSED}
    never = {name for name, rule in CELERY.names["celery.signals"].items() if rule.verdict is Verdict.CHANGES}
    assert never == {*signals.NEVER_SENT}
    app = Celery("shop", set_as_current=False)
    result = app.AsyncResult("x")
    for name in (name for name in CELERY.attributes if "(" not in name and name not in ("add_to_chord", "forget")):
        assert is_refused(app, name) or is_refused(app.control, name) or is_refused(result, name), name
    with pytest.raises(NotCovered):
        result.get(on_message=print)


def is_refused(holder: object, name: str) -> bool:
    try:
        getattr(holder, name)
    except NotCovered:
        return True
    except AttributeError:
        return False
    return False


def test_every_rule_has_a_note_unless_its_use_moves() -> None:
    for library in LIBRARIES.values():
        tables = [*library.names.values(), *library.calls.values(), library.attributes, library.settings]
        for name, rule in ((name, rule) for table in tables for name, rule in table.items()):
            assert bool(rule.note) is (rule.verdict is not Verdict.MOVES), name


@pytest.mark.slow
def test_a_project_is_read_without_its_libraries_installed(tmp_path: Path) -> None:
    project(tmp_path, tasks=TASKS)
    program = "import sys; sys.modules['celery'] = sys.modules['rq'] = None; from orchestrator.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "migrate", "check", str(tmp_path)], capture_output=True)
    assert b"85 %" in done.stdout


GUIDE = Path(__file__).parents[2] / "docs" / "from-celery.md"
PART = re.compile(r"<!-- rq -->\n.*?<!-- /rq -->\n", re.DOTALL)


def differences() -> str:
    """Return the guide's table for RQ: all rules with a note."""
    rules = {
        **{f"rq.{name}": rule for name, rule in RQ.names["rq"].items()},
        **{
            name: rule
            for module, names in RQ.names.items()
            for name, rule in names.items()
            if module.startswith("rq.") and name not in RQ.names["rq"]
        },
        **RQ.attributes,
        **RQ.calls["cron"],
        **RQ.calls["Queue"],
    }
    notes: dict[str, list[str]] = {}
    for name, rule in rules.items():
        if rule.note:
            notes.setdefault(rule.note, []).append(f"`{name}`")
    rows = "\n".join(f"| {', '.join(names)} | {note} |" for note, names in notes.items())
    return f"<!-- rq -->\n| RQ | here |\n|---|---|\n{rows}\n<!-- /rq -->\n"


def test_the_guide_matches_the_rules_for_rq() -> None:
    assert PART.search(GUIDE.read_text(encoding="utf-8"))[0] == differences()  # type: ignore[index]


if __name__ == "__main__":
    GUIDE.write_text(PART.sub(lambda _: differences(), GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
