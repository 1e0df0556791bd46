"""Postgres errors name the table and the constraint, and contain no row values."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, exc, text

from orchestrator.store.copying import copy
from orchestrator.store.driver import execute, keep_prepared
from orchestrator.store.sql import Prepared, Statement

SECRET = "hunter2"
COLUMNS = "(word) VALUES (%(word)s::text)"
PLAIN = Statement[None](f"INSERT /* test.secret */ INTO secrets {COLUMNS}")
PREPARED = Prepared[None](f"INSERT /* test.secret_prepared */ INTO secrets {COLUMNS}")
FROM_JSON = Prepared[None]("INSERT /* test.secret_json */ INTO secrets SELECT %(word)s::json ->> 0")


@pytest.fixture(params=["client", "leader"])
def connection(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Connection]:
    with engine.connect() as connection:
        if request.param == "leader":
            keep_prepared(connection)
        connection.exec_driver_sql(
            "CREATE TEMPORARY TABLE secrets (word text CONSTRAINT no_secrets CHECK (word NOT LIKE '%%hunter%%'))"
        )
        connection.commit()
        yield connection
        connection.invalidate()  # drops the temporary table


def logged_text(error: BaseException) -> str:
    """Return the full traceback of an error, with its causes."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "add",
    [
        lambda connection: PLAIN(connection, word=SECRET),
        lambda connection: PREPARED(connection, word=SECRET),
        lambda connection: connection.execute(text("INSERT INTO secrets VALUES (:word)"), {"word": SECRET}),
        lambda connection: copy(connection, "COPY secrets FROM STDIN", [f"{SECRET}\n"]),
    ],
    ids=["sqlalchemy", "driver", "text", "copy"],
)
def test_errors_of_rejected_rows_contain_no_values(connection: Connection, add: Callable[[Connection], Any]) -> None:
    with pytest.raises(exc.IntegrityError) as caught:
        add(connection)
    told = logged_text(caught.value)
    assert SECRET not in told
    assert "no_secrets" in told
    assert "secrets" in str(caught.value)


def test_errors_of_unreadable_values_contain_no_values(connection: Connection) -> None:
    with pytest.raises(exc.DataError, match="invalid input syntax for type json") as caught:
        FROM_JSON(connection, word=f'{{"password": {SECRET}}}')
    assert SECRET not in logged_text(caught.value)


def test_errors_of_plain_statements_contain_no_values(engine: Engine) -> None:
    with pytest.raises(exc.ProgrammingError, match="function nothing") as caught:
        execute(engine, "SELECT nothing(%(word)s)", {"word": SECRET})
    told = logged_text(caught.value)
    assert SECRET not in told
    assert "HINT:" in told


def test_outage_errors_contain_no_values(connection: Connection) -> None:
    """An error converted to another type contains no values either."""
    connection.exec_driver_sql("SET TRANSACTION READ ONLY")
    with pytest.raises(exc.OperationalError, match="read-only") as caught:
        connection.exec_driver_sql("CREATE TABLE orchestrator.never AS SELECT %(word)s", {"word": SECRET})
    assert SECRET not in logged_text(caught.value)
