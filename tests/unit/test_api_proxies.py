"""Trusted proxies say who a user is, and from which address a request comes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from orchestrator.api import access
from orchestrator.api.access import LoginLimits
from orchestrator.api.problems import Refused
from orchestrator.api.proxies import Proxies, User
from orchestrator.domain.access import Scope
from orchestrator.errors import ConfigurationError
from orchestrator.settings import Settings

SSO = Settings(
    api_proxies="10.0.0.5, 192.168.7.0/24, fd00::/8",
    api_user_header="X-User",
    api_group_header="X-Groups",
    api_group_scopes="ops=operate, platform=admin, guests=none",
)


def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.lower().encode(), value.encode("latin-1")) for name, value in pairs])


@pytest.mark.parametrize("peer", ["10.0.0.5", "192.168.7.9", "fd00::1", "::ffff:10.0.0.5"])
def test_the_user_header_of_a_trusted_proxy_is_used(peer: str) -> None:
    assert Proxies(SSO).user(peer, headers(("X-User", "alice"))) == User("alice", Scope.READ)


@pytest.mark.parametrize("peer", ["10.0.0.6", "192.168.8.1", "127.0.0.1", "::1", "", "unix"])
def test_headers_of_other_peers_are_ignored(peer: str) -> None:
    given = headers(("X-User", "alice"), ("X-Groups", "platform"), ("X-Forwarded-For", "203.0.113.9"))
    assert Proxies(SSO).user(peer, given) is None
    assert Proxies(SSO).origin(peer, given) == peer


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("/jobs", "/jobs"),
        ("/team-a/jobs_2/", "/team-a/jobs_2"),
        ("/", ""),
        ("", ""),
        ("jobs", ""),
        ("//evil.example", ""),
        ("/a//b", ""),
        ("/../b", ""),
        ("/a/.", ""),
        ("/.well-known", "/.well-known"),
        ('/"><script>', ""),
        ("/a b", ""),
        ("/a?b", ""),
        ("https://evil.example", ""),
        ("/" + "a" * 300, ""),
    ],
)
def test_only_a_valid_prefix_of_a_trusted_proxy_is_used(given: str, found: str) -> None:
    told = headers(("X-Forwarded-Prefix", given))
    assert Proxies(SSO).prefix("10.0.0.5", told) == found
    assert Proxies(SSO).prefix("10.0.0.6", told) == ""


def test_groups_determine_the_scope_of_a_user() -> None:
    def scope(groups: str) -> Scope | None:
        found = Proxies(SSO).user("10.0.0.5", headers(("X-User", "alice"), ("X-Groups", groups)))
        assert found is not None
        return found.scope

    assert [scope(groups) for groups in ("ops", "ops, platform", "others", "guests", "")] == [
        Scope.OPERATE,
        Scope.ADMIN,
        Scope.READ,
        Scope.READ,
        Scope.READ,
    ]


def test_without_a_user_header_there_is_no_user() -> None:
    assert Proxies(SSO).user("10.0.0.5", headers()) is None
    assert Proxies(SSO).user("10.0.0.5", headers(("X-User", " "))) is None
    assert Proxies(Settings(api_proxies="10.0.0.5")).user("10.0.0.5", headers(("X-User", "alice"))) is None


@pytest.mark.parametrize("given", [[("X-User", "alice"), ("X-User", "root")], [("X-User", "a" * 201)]])
def test_invalid_user_names_are_rejected(given: list[tuple[str, str]]) -> None:
    with pytest.raises(Refused) as caught:
        Proxies(SSO).user("10.0.0.5", headers(*given))
    assert caught.value.problem.status == 403


def test_the_origin_is_the_last_untrusted_address() -> None:
    given = headers(("X-Forwarded-For", "1.2.3.4, 203.0.113.9"), ("X-Forwarded-For", "192.168.7.2"))
    assert Proxies(SSO).origin("10.0.0.5", given) == "203.0.113.9"  # the client itself wrote 1.2.3.4
    assert Proxies(SSO).origin("10.0.0.5", headers()) == "10.0.0.5"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Settings(api_proxies="proxy.corp"), "api_proxies: expected addresses"),
        (Settings(api_user_header="X-User"), "api_user_header requires api_proxies"),
        (Settings(api_user_scope="root"), "api_user_scope: expected one of read"),
        (Settings(api_group_scopes="ops"), "api_group_scopes: expected one of read"),
    ],
)
def test_invalid_proxy_settings_are_rejected(wrong: Settings, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Proxies(wrong)


def test_an_address_with_many_wrong_keys_has_to_wait_before_logging_in(monkeypatch: pytest.MonkeyPatch) -> None:
    known = LoginLimits()
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=lambda: 1_000.0))
    for _ in range(access._MAX_WRONG_KEYS):
        assert known.wait("203.0.113.9") == 0
        known.count_wrong_key("203.0.113.9")
    assert known.wait("203.0.113.9") == 60
    assert known.wait("203.0.113.8") == 0
    monkeypatch.setattr(access, "_PERIOD", 0.0)
    assert known.wait("203.0.113.9") == 0


def test_login_limits_are_bounded_and_count_by_ipv6_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_MAX_ADDRESSES", 100)
    known = LoginLimits()
    for number in range(access._MAX_WRONG_KEYS):
        known.count_wrong_key(f"2001:db8::{number:x}")
    assert known.wait("2001:db8::ffff") > 0
    for number in range(1_000):
        known.count_wrong_key(f"10.0.{number // 250}.{number % 250}")
    assert len(known._wrong_keys) <= 100
