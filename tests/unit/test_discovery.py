"""URLs of Sentinels and clusters, and the answer to CLUSTER SLOTS."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError

from orchestrator.errors import ConfigurationError
from orchestrator.settings import Settings
from orchestrator.transport.connection import connect
from orchestrator.transport.discovery import _owner, discovery_of


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("redis+sentinel://a,b:1/mymaster", "redis://discovered/0"),
        ("redis+sentinel://u:p%40@a/mymaster/3", "redis://u:p%40@discovered/3"),
        ("rediss+sentinel://a/m/0?sentinel_password=s&ssl_ca_certs=/ca", "rediss://discovered/0?ssl_ca_certs=%2Fca"),
        ("redis+cluster://a,b", "redis://discovered/0"),
        ("rediss+cluster://:p@[::1]:1,b:2/0#shop", "rediss://:p@discovered/0"),
    ],
)
def test_the_options_of_a_url_apply_to_the_discovered_server(url: str, server: str) -> None:
    discovered = discovery_of(url)
    assert discovered is not None
    assert discovered.url == server
    connect(url).close()


def test_the_url_of_a_single_server_needs_no_discovery() -> None:
    assert discovery_of("redis://a/0") is None
    assert discovery_of("unix:///a+b.sock") is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://a", "the name of the master is missing"),
        ("redis+cluster://a/1", "a cluster has only database 0, found '1'"),
        ("redis+cluster://a:x", "expected host:port, found 'a:x'"),
        ("redis+cluster://a,", "expected host:port, found ''"),
        ("unix+cluster:///a", "expected redis\\+sentinel"),
        ("redis+other://u:secret@a", "expected redis\\+sentinel"),
    ],
)
def test_invalid_urls_are_rejected(url: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Setting redis_url: .*{problem}") as caught:
        connect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_unreachable_seeds_are_an_outage(kind: str) -> None:
    url = f"redis+{kind}://127.0.0.1:1,127.0.0.1:2/{'m' if kind == 'sentinel' else ''}"
    refused = pytest.raises(ConnectionError, match=r"through 127\.0\.0\.1:1,127\.0\.0\.1:2: .*[Cc]onnect")
    with connect(url, timeout=0.5) as redis, refused:
        redis.ping()


def test_the_namespace_chooses_the_slot_of_a_cluster() -> None:
    assert Settings(redis_url="redis+cluster://a", namespace="shop").require_redis() == "redis+cluster://a#shop"
    assert Settings(redis_url="redis://a", namespace="shop").require_redis() == "redis://a"


def test_the_owner_of_a_slot_is_found() -> None:
    slots = [
        [0, 99, [b"10.0.0.1", 1, b"id"], [b"10.0.0.2", 2, b"id"]],
        [100, 200, [None, 3, b"id"]],  # null: the host that was asked
        [201, 300, [b"?", 4, b"id", [b"hostname", b"x"]]],
    ]
    asked = ("seed", 9)
    assert [_owner(slots, slot, asked)[0] for slot in (0, 99, 100, 201, 301)] == [
        ("10.0.0.1", 1),
        ("10.0.0.1", 1),
        ("seed", 3),
        ("seed", 4),
        None,
    ]
    assert _owner(slots, 0, asked)[1] == [("10.0.0.1", 1), ("10.0.0.2", 2), ("seed", 3), ("seed", 4)]
