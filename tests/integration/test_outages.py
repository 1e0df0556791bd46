"""What a failing server looks like to the code that must survive it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.embedded import EmbeddedPostgres
from orchestrator.store import database


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, to be broken."""
    server = EmbeddedPostgres(tmp_path)
    server.start()
    yield server
    server.stop("immediate")


def test_a_crash_of_postgres_between_two_statements_is_an_outage(postgres: EmbeddedPostgres) -> None:
    engine = database.engine_for(postgres.url)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        postgres.stop("immediate")
        postgres.start()
        with pytest.raises(database.UNAVAILABLE) as caught:
            connection.exec_driver_sql("SELECT 2")
        assert database.is_outage(caught.value)
        assert connection.invalidated
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 3").scalar() == 3
    engine.dispose()
