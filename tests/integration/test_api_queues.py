"""Queues over HTTP: an unknown name is a typing error, unless the request calls the queue new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emptying import empty
from tests.integration.api_house import House, changes, furnished


@pytest.fixture
def house(database_url: str, redis_url: str) -> Iterator[House]:
    with furnished(database_url, redis_url) as house:
        yield house
        with house.engine.connect() as connection:
            empty(connection)


CHANGES = [("POST", "pause"), ("POST", "resume"), ("PUT", "limits"), ("PUT", "retention"), ("POST", "purge")]


@pytest.mark.parametrize(("method", "what"), CHANGES, ids=[what for _, what in CHANGES])
def test_an_unknown_queue_is_rejected_with_the_nearest_name(house: House, method: str, what: str) -> None:
    key = house.make_key(None, None)
    before = changes(house)
    refused = house.send(method, f"/api/v1/queues/mail.otu/{what}", key, json={})
    assert refused.status_code == 404
    assert "Did you mean 'mail.out'?" in refused.json()["detail"]
    assert changes(house) == before
    has_new = what in ("pause", "limits", "retention")
    assert ("?new=true" in refused.json()["detail"]) == has_new
    meant = house.send(method, f"/api/v1/queues/mail.otu/{what}?new=true", key, json={})
    assert meant.status_code == (200 if has_new else 422)
    assert house.send(method, f"/api/v1/queues/mail.out/{what}", key, json={}).is_success


def test_a_scoped_key_gets_no_queue_suggestions(house: House) -> None:
    refused = house.send("POST", "/api/v1/queues/mail.otu/pause")
    assert refused.status_code == 404
    assert "mail.out" not in refused.text
