"""Tasks in modules of their own: `Orchestrator(include=…)`, and discovery of `tasks` modules in packages."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import ConfigurationError, Orchestrator, Settings, UnknownTask
from orchestrator.sdk.modules import ImportFailed
from orchestrator.workers.functions import load_app

Write = Callable[..., None]
TASK = "from bakery.app import app\n\n\n@app.task\ndef bake(loaves: int) -> int:\n    return loaves\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A function that writes the modules of a project into the current folder."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    path = list(sys.path)

    def write(**files: str) -> None:
        for name, body in files.items():
            file = tmp_path / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(body))

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "bakery":
            del sys.modules[name]


def app(**options: Any) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"from orchestrator import Orchestrator\n\napp = Orchestrator({given})\n"


def test_included_modules_are_imported_when_the_application_is_loaded(write: Write) -> None:
    write(bakery__app=app(include=["bakery.bread", "bakery.cakes"]), bakery__bread=TASK, bakery__cakes=TASK)
    found = load_app("bakery.app:app")
    assert sorted(found.tasks) == ["bakery.bread.bake", "bakery.cakes.bake"]


@pytest.mark.slow
def test_a_program_imports_included_modules_when_a_name_is_unknown(write: Write) -> None:
    write(bakery__app=app(include=["bakery.bread"]), bakery__bread=TASK)
    program = """
        from bakery.app import app
        assert not app.tasks
        print(app.find_task("bakery.bread.bake").name, list(app.tasks))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout == "bakery.bread.bake ['bakery.bread.bake']\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["queues()", "load_modules()", "code_workflows.find('bakery.bread.order')"])
def test_calls_that_need_all_tasks_import_included_modules(write: Write, ask: str) -> None:
    order = "\n\n@app.workflow\nasync def order(ctx: object) -> None: ...\n"
    write(bakery__app=app(include=["bakery.bread"]), bakery__bread=TASK + order)
    program = f"from bakery.app import app\napp.{ask}\nassert app.tasks and app.code_workflows"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_tasks_modules_are_found_anywhere_below_a_package(write: Write) -> None:
    write(
        bakery__app=app(autodiscover=["bakery"]),
        bakery__tasks=TASK,
        bakery__bread__tasks=TASK,
        bakery__cakes__tasks__sweet=TASK,
        bakery__cakes__tasks__deeper__salty=TASK,
        bakery__cakes__other="raise SystemError('nobody asked for it')",
        bakery__pies__other="raise SystemError('nobody asked for it')",
    )
    found = load_app("bakery.app:app")
    places = ["bread.tasks", "cakes.tasks.deeper.salty", "cakes.tasks.sweet", "tasks"]
    assert sorted(found.tasks) == [f"bakery.{place}.bake" for place in places]


@pytest.mark.parametrize(
    ("given", "files", "said"),
    [
        (
            {"include": ["bakery.bred"]},
            {"bakery__bread": TASK},
            r"Orchestrator\(include=…\): there is no module 'bakery.bred'. Did you mean 'bakery.bread'\?",
        ),
        ({"include": ["backery.bread"]}, {}, "there is no module 'backery.bread'"),
        (
            {"include": ["bakery.bread"]},
            {"bakery__bread": "import nothing_of_the_kind\n"},
            r"module 'bakery.bread' cannot be imported. ModuleNotFoundError: No module named 'nothing_of_the_kind'"
            r"\n  in .*/bakery/bread.py, line 1",
        ),
        (
            {"include": ["bakery.bread"]},
            {"bakery__bread": "def bake(:\n"},
            r"module 'bakery.bread' cannot be imported. SyntaxError: .*\n  in .*/bakery/bread.py, line 1",
        ),
        (
            {"include": ["bakery.bread"]},
            {"bakery__bread": "from bakery.app import app\n\n\n@app.task(retires=3)\ndef bake() -> None: ...\n"},
            r"'bakery.bread' cannot be imported. UnknownOption: .*'retries'(?s:.*)\n  in .*/bakery/bread.py, line 4",
        ),
        ({"autodiscover": ["backery"]}, {}, r"\(autodiscover=…\): there is no package 'backery'"),
        ({"autodiscover": ["bakery.bread"]}, {"bakery__bread": TASK}, "A single module belongs in include="),
        (
            {"autodiscover": ["bakery"]},
            {"bakery__bread": TASK},
            "'bakery' has no module called 'tasks', nor has one below",
        ),
        (
            {"autodiscover": ["bakery"]},
            {"bakery__bread__tasks": "1 / 0"},
            r"\(autodiscover=…\): module 'bakery.bread.tasks' cannot be imported. ZeroDivisionError",
        ),
    ],
)
def test_an_import_error_names_the_module_and_the_reason(
    write: Write, given: dict[str, Any], files: dict[str, str], said: str
) -> None:
    write(bakery__app=app(**given), **files)
    with pytest.raises(ConfigurationError, match=said):
        load_app("bakery.app:app")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def f(:\n", r"SyntaxError: invalid syntax\n  in .*/bakery/app.py, line 1: def f\(:$"),
        (
            "x = 1\nimport nothing_of_the_kind\n",
            "ModuleNotFoundError: .*\n  in .*/bakery/app.py, line 2: import nothing",
        ),
        ("from bakery import nothing\n", "ImportError: cannot import name 'nothing'.*\n  in .*/bakery/app.py, line 1"),
        ("import os\nos.environ['NOPE']\n", r"KeyError: 'NOPE'\n  in .*/bakery/app.py, line 2: os.environ\['NOPE'\]$"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3\n  in .*/bakery/app.py, line 2: sys.exit\(3\)$"),
        (
            "import json\njson.loads('')\n",
            r"JSONDecodeError: .*\n  in .*/bakery/app.py, line 2: .*\n  in .*/decoder.py",
        ),
        (
            app() + "@app.task(retires=3)\ndef f() -> None: ...\n",
            r"UnknownOption: (?s:.*)\n  in .*/bakery/app.py, line 4",
        ),
    ],
)
def test_an_application_that_raises_is_reported_with_its_line(write: Write, body: str, said: str) -> None:
    write(bakery__app=body)
    with pytest.raises(ImportFailed, match=f"^The application bakery.app:app cannot be loaded. {said}"):
        load_app("bakery.app:app")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("bakery/app.py", "not as a file; found 'bakery/app.py'. Did you mean 'bakery.app:app'?"),
        ("./bakery/app.py:shop", "found './bakery/app.py:shop'. Did you mean 'bakery.app:app'?"),
        ("bakery/ap.py:app", "not as a file; found 'bakery/ap.py:app'."),
        ("bakery.ap:app", "There is no module 'bakery.ap' to find the application in. Did you mean 'bakery.app'? Look"),
        ("bakery.app:ap", "'ap' in module 'bakery.app' is not an Orchestrator. Did you mean 'app'?"),
        ("bakery.none:app", "is not an Orchestrator. The module has none: create one with app = Orchestrator()."),
        ("bakery:app", "'app' in module 'bakery' is not an Orchestrator. Did you mean 'bakery.celery:app'?"),
        ("bakery.two", "holds 2 applications. Name one: bakery.two:one, bakery.two:two."),
    ],
)
def test_only_existing_applications_are_suggested(write: Write, given: str, said: str) -> None:
    two = "from orchestrator import Orchestrator\n\none, two = Orchestrator(), Orchestrator()\n"
    write(bakery__app=app(), bakery__celery=app(), bakery__none="", bakery__two=two)
    with pytest.raises(ConfigurationError, match=re.escape(said) + ("$" if said.endswith("'.") else "")):
        load_app(given)


@pytest.mark.parametrize("given", ["shop.mail", ["shop mail"], [1], [""]])
@pytest.mark.parametrize("option", ["include", "autodiscover"])
def test_invalid_lists_of_modules_are_rejected_at_once(option: str, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Orchestrator\({option}=…\): expected a list of names"):
        Orchestrator(Settings(), **{option: given})


def test_an_unknown_task_is_reported_after_the_imports(write: Write) -> None:
    write(bakery__app=app(include=["bakery.bread"]), bakery__bread=TASK)
    with pytest.raises(UnknownTask, match="Did you mean 'bakery.bread.bake'"):
        load_app("bakery.app:app").find_task("bakery.bread.bak")


@pytest.mark.slow
def test_a_program_that_declares_tasks_loads_no_server_library(write: Write) -> None:
    """A web application pays for this import at each start, and may never enqueue a task."""
    write(bakery__app=app() + TASK.partition("\n\n\n")[2])
    program = """
        import sys
        import bakery.app
        heavy = {"redis", "sqlalchemy", "psycopg2", "opentelemetry", "importlib.metadata"}
        heavy |= {"difflib", "zoneinfo"}
        heavy &= set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {['.', *sys.path]!r}\n{textwrap.dedent(program)}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


_A_SCHEDULER = """
import sys
import orchestrator.scheduler.process
heavy = {"alembic", "croniter", "dateutil", "difflib", "multiprocessing", "sqlalchemy.orm", "yaml"}
heavy |= {f"orchestrator.{part}" for part in ("api", "cli", "sdk.app", "store.insights", "store.tables.runs")}
heavy &= set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.slow
def test_a_scheduler_loads_only_modules_that_it_always_uses() -> None:
    """Each tenant may have a scheduler, for a namespace without work."""
    done = subprocess.run([sys.executable, "-c", _A_SCHEDULER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
