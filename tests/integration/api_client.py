"""The HTTP API, asked in this process without a server around it, and what tests of it begin with."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine
from starlette.applications import Starlette

from orchestrator.api.app import create_app
from orchestrator.domain.access import Scope, Secret
from orchestrator.settings import Settings, load_settings
from orchestrator.store import keys
from orchestrator.store.database import engine_for
from tests.emptying import empty


@pytest.fixture(name="engine")
def empty_engine(database_url: str) -> Iterator[Engine]:
    """Import this into a module each of whose tests begins with empty tables."""
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection)
    yield engine
    engine.dispose()


@pytest.fixture(name="settings")
def bare_settings(engine: Engine, database_url: str, redis_url: str) -> Settings:
    """Import this, too, for what a server or a client is to have."""
    del engine
    return load_settings(environ={}, database_url=database_url, redis_url=redis_url)


class ApiClient:
    """Asks an application."""

    def __init__(self, app: Starlette | Settings) -> None:
        self.app = create_app(app) if isinstance(app, Settings) else app

    def opened(self, peer: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
        """Return a client for several requests of one event loop."""
        transport = httpx.ASGITransport(self.app, client=(peer, 1234))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=90, **options)

    def send(self, method: str, path: str, *, peer: str = "127.0.0.1", key: object = None, **given: Any) -> Any:
        """Return the answer to one request, of somebody who may have a key."""
        if key is not None:
            given["headers"] = {**given.get("headers", {}), "Authorization": f"Bearer {key}"}

        async def ask() -> httpx.Response:
            async with self.opened(peer) as client:
                return await client.request(method, path, **given)

        return asyncio.run(ask())

    def send_all(self, *requests: tuple[str, str], key: object = None) -> list[httpx.Response]:
        """Return the answers to requests without bodies, one after another."""

        async def ask() -> list[httpx.Response]:
            async with self.opened(headers={} if key is None else {"Authorization": f"Bearer {key}"}) as client:
                return [await client.request(*request) for request in requests]

        return asyncio.run(ask())

    def get(self, path: str, **given: Any) -> Any:
        return self.send("GET", path, **given)

    def post(self, path: str, json: Any = None, **given: Any) -> Any:
        return self.send("POST", path, **({} if json is None else {"json": json}), **given)


@pytest.fixture(name="api")
def bare_api(settings: Settings) -> ApiClient:
    """Import this, too, to ask it."""
    return ApiClient(settings)


def make_key(engine: Engine, scope: Scope = Scope.ADMIN, name: str = "test", **bounds: Any) -> Secret:
    """Store a new key; without bounds it reaches everything and does not expire."""
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        keys.add(connection, secret, name, scope, bounds.pop("expires_at", None), **bounds)
    return secret
