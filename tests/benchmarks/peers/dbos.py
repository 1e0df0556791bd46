"""DBOS: each task is a workflow in a queue. Worker and client poll Postgres: every 5 ms and every millisecond here."""

from __future__ import annotations

import os
import threading
from typing import Any

import sqlalchemy
from dbos import DBOS, DBOSClient
from sqlalchemy.engine import make_url

from tests.benchmarks.peers import queue as base
from tests.benchmarks.peers.queue import Queue, effect, expect

URL = make_url(os.environ["BENCH_DATABASE_URL"]).set(drivername="postgresql+psycopg").render_as_string(False)
QUEUE = "bench"


@DBOS.workflow(name="noop")
def noop() -> int:
    return effect()


@DBOS.step(name="step")
def step() -> int:
    return effect()


@DBOS.workflow(name="sequence")
def sequence(count: int) -> int:
    return sum(step() for _ in range(count))


@DBOS.step(name="fibonacci")
def fibonacci(number: int) -> int:
    return base.fibonacci(number)


@DBOS.workflow(name="fibonaccis")
def fibonaccis(count: int) -> int:
    return [fibonacci(10) for _ in range(count)][-1]


def launch() -> None:
    executor = str(os.getpid())
    config: Any = {"name": "bench", "system_database_url": URL, "executor_id": executor, "log_level": "ERROR"}
    DBOS(config={**config, "application_version": "1", "sys_db_pool_size": 20})
    DBOS.launch()


class DbosQueue(Queue):
    packages = ("dbos", "psycopg", "SQLAlchemy")

    def prepare(self) -> None:
        launch()
        DBOS.register_queue(QUEUE, polling_interval_sec=0.005)
        DBOS.destroy()
        self._client = DBOSClient(system_database_url=URL, application_name="bench", system_database_pool_size=20)
        self._engine = sqlalchemy.create_engine(URL)

    def send(self) -> Any:
        return self._start("noop")

    def _start(self, workflow: str, *arguments: Any) -> Any:
        return self._client.enqueue({"workflow_name": workflow, "queue_name": QUEUE}, *arguments)

    def wait(self, handle: Any) -> None:
        expect("result", handle.get_result(polling_interval_sec=0.001), 1)

    def enqueue_bulk(self, count: int) -> None:
        with self._engine.begin() as transaction:
            for _ in range(count):
                options: Any = {"workflow_name": "noop", "queue_name": QUEUE}
                self.last = self._client.enqueue_in_transaction(transaction, options)

    def ended(self) -> int:
        with self._engine.connect() as connection:
            query = "SELECT count(*) FROM dbos.workflow_status WHERE name = 'noop' AND status = 'SUCCESS'"
            return int(connection.execute(sqlalchemy.text(query)).scalar_one())

    def run_steps(self, count: int) -> None:
        expect("result", self._start("sequence", count).get_result(polling_interval_sec=0.001), count)

    def run_fibonacci(self, count: int) -> None:
        expect("result", self._start("fibonaccis", count).get_result(polling_interval_sec=0.001), 55)


queue = DbosQueue()

if __name__ == "__main__":
    launch()
    threading.Event().wait()
