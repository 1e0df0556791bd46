"""A Django project: its settings, models, tasks, admin and commands, with a scheduler and a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import django
import psycopg2.extensions
import pytest

from tests.acceptance.pages import REPOSITORY, files_in
from tests.forking import FORKING, Program
from tests.waiting import eventually

MANAGE = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
SETTINGS = """
import os
SECRET_KEY = "x"
USE_TZ = True
ROOT_URLCONF = "mysite.urls"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
    "django.contrib.messages",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {
    "context_processors": ["django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
                           "django.contrib.messages.context_processors.messages"]}}]
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", **%s}}
TASKS = {"default": {"BACKEND": "orchestrator.contrib.django.backend.OrchestratorBackend", "OPTIONS": {"retries": 1}}}
"""
URLS = """
from django.contrib import admin
from django.urls import path
from orders import views
urlpatterns = [path("admin/", admin.site.urls), path("orders/<str:customer>/", views.place)]
"""
MODELS = """
from django.db import models
class Order(models.Model):
    customer = models.CharField(max_length=50)
    is_invoiced = models.BooleanField(default=False)
"""
OTHER_TASKS = """

from django.db import connection
from django_tasks import task

app.schedule(every="1h", params={"order_id": 1})(send_invoice)  # which reads the settings
assert app._client._settings is not None

@task(takes_context=True)
def count(context, customer: str) -> int:
    if context.attempt == 1:
        raise ValueError("once")
    return Order.objects.filter(customer=customer).count()

@task
async def shout(word: str) -> str:
    return word.upper() if await Order.objects.aexists() else word

@app.task
async def note(customer: str) -> int:
    await Order.objects.acreate(customer=customer)
    return await Order.objects.acount()

@task
def connected() -> bool:
    before = connection.connection is not None
    Order.objects.count()
    return before
"""
TESTS = """
from datetime import timedelta

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from django.utils import timezone
from django_tasks import TaskResultStatus, default_task_backend
from django_tasks.exceptions import TaskResultDoesNotExist

from orchestrator import NotFound
from orchestrator.contrib.django import app
from orchestrator.testing import eager, recording
from orders import tasks
from orders.models import Order


def uses_the_test_database(case):
    case.assertRegex(app.settings.database_url, "/test_[a-z0-9_]*_[12][?]", "that of its process")
    handle = tasks.send_invoice.enqueue(7)
    case.assertEqual(handle.status(), "pending")
    handle.cancel()


def invoices_in_memory(case):
    with eager(app), transaction.atomic():
        order = Order.objects.create(customer="Ann")
        tasks.send_invoice.enqueue_in(connection, order.pk).result()
    with recording(app) as test, transaction.atomic():
        order = Order.objects.create(customer="Bob")
        tasks.send_invoice.enqueue_in(connection, order.pk)
        test.drain()
    case.assertEqual(Order.objects.filter(is_invoiced=True).count(), 2)


class Committed(TransactionTestCase):
    def test_tasks_in_memory_take_part_in_the_open_transaction(self):
        invoices_in_memory(self)


class Others(TestCase):
    def test_the_test_database_is_used(self):
        uses_the_test_database(self)


class Orders(TestCase):
    def test_a_request_enqueues_in_its_transaction(self):
        self.client.post("/orders/Ann/")
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM orchestrator.tasks")
            self.assertEqual(cursor.fetchall(), [("orders.tasks.send_invoice",)])

    def test_a_plain_call(self):
        order = Order.objects.create(customer="Bob")
        tasks.send_invoice(order.pk)
        order.refresh_from_db()
        self.assertTrue(order.is_invoiced)

    def test_django_tasks(self):
        later = tasks.count.using(run_after=timezone.now() + timedelta(days=1), priority=7)
        with transaction.atomic():
            result = later.enqueue("Ann")
            self.assertEqual(result.status, TaskResultStatus.READY)
            transaction.set_rollback(True)
        with self.assertRaises(TaskResultDoesNotExist):
            default_task_backend.get_result(result.id)
        with self.assertRaises(TaskResultDoesNotExist):
            default_task_backend.get_result("nothing")

    def test_the_test_database_is_used(self):
        uses_the_test_database(self)

    def test_tasks_in_memory_take_part_in_the_transaction_of_the_test(self):
        invoices_in_memory(self)
        with eager(app):
            self.assertEqual(tasks.note.enqueue("Eve").result(), 3)
        self.assertEqual(Order.objects.count(), 3)

    async def test_the_same_in_an_async_test(self):
        with recording(app) as test:
            await tasks.note.aenqueue("Eve")
            await sync_to_async(test.drain)()
        self.assertEqual(await Order.objects.acount(), 1)

    def test_what_they_write_is_rolled_back(self):
        self.assertEqual(Order.objects.count(), 0)

    def test_the_admin_links_to_the_dashboard(self):
        from django.contrib.auth.models import User

        self.client.force_login(User.objects.create_superuser("root"))
        self.assertContains(self.client.get("/admin/"), "/admin/orchestrator/dashboard/")
        there = self.client.get("/admin/orchestrator/dashboard/")
        self.assertEqual(there.headers["Location"], "https://tasks.example.com/ui")
"""
USE = """
from django.test import Client
from django_tasks import TaskResultStatus
from orders.models import Order
from orders.tasks import connected, count, shout
import time

assert Client(headers={"host": "localhost"}).post("/orders/Ann/").status_code == 200
results = [count.enqueue("Ann"), shout.enqueue("hello")]
deadline = time.monotonic() + 60
while time.monotonic() < deadline and not (
    Order.objects.get(customer="Ann").is_invoiced and all(result.is_finished for result in results)
):
    time.sleep(0.05)
    for result in results:
        result.refresh()
first, second = results
assert Order.objects.get(customer="Ann").is_invoiced
assert (first.status, first.return_value, first.args) == (TaskResultStatus.SUCCESSFUL, 1, ["Ann"]), first
assert [error.exception_class for error in first.errors] == [ValueError], first.errors
assert second.return_value == "HELLO", second
for number in range(3):
    third = connected.enqueue()
    while not third.is_finished and time.monotonic() < deadline:
        time.sleep(0.05)
        third.refresh()
    assert third.return_value is False, "CONN_MAX_AGE is 0, so each attempt begins without a connection"
"""


def _with_tasks(code: str) -> str:
    """Return code that imports Django's own tasks instead of the backport, if Django has them."""
    return code.replace("from django_tasks", "from django.tasks") if django.VERSION >= (6,) else code


class Project:
    """A Django project in a folder."""

    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        self._folder = folder
        known = psycopg2.extensions.parse_dsn(database_url)
        names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
        database = {names[key]: value for key, value in known.items()}
        guide = files_in(REPOSITORY / "docs" / "web.md")
        files = {
            "manage.py": MANAGE,
            "mysite/settings.py": SETTINGS % database
            + guide["mysite/settings.py"].replace("redis://localhost:6379/0", redis_url),
            "mysite/urls.py": URLS,
            "orders/models.py": MODELS,
            "orders/tasks.py": guide["orders/tasks.py"] + OTHER_TASKS,
            "orders/views.py": guide["orders/views.py"],
            "orders/tests.py": TESTS,
        }
        for name in ("mysite", "orders", "orders/migrations"):
            (folder / name).mkdir()
            (folder / name / "__init__.py").touch()
        for name, body in files.items():
            (folder / name).write_text(_with_tasks(body))
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCHESTRATOR_")}
        self._running: list[Program] = []

    def manage(self, *words: str, input: str = "") -> str:
        done = FORKING.run("manage.py", *words, environment=self._environment, folder=self._folder, input=input)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *words: str, until: str) -> None:
        log = self._folder / "server.log"
        with log.open("wb") as output:
            process = FORKING.begin(
                "manage.py", *words, environment=self._environment, folder=self._folder, stdout=output, stderr=output
            )
        self._running.append(process)
        eventually(lambda: until in log.read_text(), f"{words} is ready, see {log}")

    def stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            process.wait(60)


@pytest.fixture
def project(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Project]:
    project = Project(tmp_path, database_url, redis_url)
    yield project
    project.stop()


def test_a_django_project_runs_tests_tasks_and_commands(project: Project) -> None:
    project.manage("makemigrations", "orders")
    assert "No changes" in project.manage("makemigrations"), "the model of the dashboard wants no migration"
    project.manage("test", "--parallel", "2")
    assert "orchestrator.Dashboard" not in project.manage("migrate"), "Django has nothing to warn of"
    project.start("orchestrator", "dev", "--port", "0", until="ready")
    project.manage("shell", input=_with_tasks(USE))
    assert "orders.tasks.send_invoice" in project.manage("orchestrator", "tasks", "list")
