"""A client that calls the HTTP API in this process, without a server, and the fixtures of API tests."""

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
    """A database engine with empty tables. Import it into a module to use it."""
    engine = engine_for(database_url, autocommit=True)
    with engine.connect() as connection:
        empty(connection)
    yield engine
    engine.dispose()


@pytest.fixture(name="settings")
def bare_settings(engine: Engine, database_url: str, redis_url: str) -> Settings:
    """Settings of a server or client. Import it into a module to use it."""
    del engine
    return load_settings(environ={}, database_url=database_url, redis_url=redis_url)


class ApiClient:
    """A client of an ASGI application in this process."""

    def __init__(self, app: Starlette | Settings) -> None:
        self.app = create_app(app) if isinstance(app, Settings) else app

    def opened(self, peer: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
        """Return an httpx client for several requests within one event loop."""
        transport = httpx.ASGITransport(self.app, client=(peer, 1234))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=90, **options)

    def send(self, method: str, path: str, *, peer: str = "127.0.0.1", key: object = None, **options: Any) -> Any:
        """Send one request, with an API key if given; return the response."""
        if key is not None:
            options["headers"] = {**options.get("headers", {}), "Authorization": f"Bearer {key}"}

        async def ask() -> httpx.Response:
            async with self.opened(peer) as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def send_all(self, *requests: tuple[str, str], key: object = None) -> list[httpx.Response]:
        """Send requests without bodies one after another; return the responses."""

        async def ask() -> list[httpx.Response]:
            async with self.opened(headers={} if key is None else {"Authorization": f"Bearer {key}"}) as client:
                return [await client.request(*request) for request in requests]

        return asyncio.run(ask())

    def get(self, path: str, **options: Any) -> Any:
        return self.send("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> Any:
        return self.send("POST", path, **({} if json is None else {"json": json}), **options)


@pytest.fixture(name="api")
def bare_api(settings: Settings) -> ApiClient:
    """A client of the API. Import it into a module to use it."""
    return ApiClient(settings)


def make_key(engine: Engine, scope: Scope = Scope.ADMIN, name: str = "test", **bounds: Any) -> Secret:
    """Store a new API key. Without bounds the key is valid for everything and never expires."""
    secret = Secret(secrets.token_hex(6), secrets.token_urlsafe(32))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        keys.add(connection, secret, name, scope, bounds.pop("expires_at", None), **bounds)
    return secret
