"""Patterns of what is not shown."""

from __future__ import annotations

import pytest

from orchestrator import Orchestrator
from orchestrator.domain.redaction import HIDDEN, Redaction, placed, scrub, words
from orchestrator.errors import InvalidTask
from orchestrator.settings import load_settings


def test_a_name_is_hidden_at_any_depth_and_a_path_where_something_ends_so() -> None:
    hidden = Redaction(["password", "card.*", "*_key"])
    data = {
        "user": "alice",
        "Password": "p",
        "inner": [{"password": ["a", "b"]}, {"api_key": 7}],
        "card": {"number": "4", "holder": {"name": "x"}},
        "cards": {"number": "4"},
    }
    assert hidden.shown(data) == {
        "user": "alice",
        "Password": HIDDEN,
        "inner": [{"password": HIDDEN}, {"api_key": HIDDEN}],
        "card": {"number": HIDDEN, "holder": HIDDEN},
        "cards": {"number": "4"},
    }
    assert data["Password"] == "p"


def test_nothing_stays_nothing() -> None:
    assert Redaction(["password"]).shown({"password": None}) == {"password": None}
    assert Redaction().shown({"password": "p"}) == {"password": "p"}
    assert not Redaction()


def test_arguments_without_names_have_places() -> None:
    patterns = placed(["token", "card.number", "pass*"], ["user", "token", "card", "password"])
    assert patterns == ("@1", "@2.number", "@3")
    arguments, keywords = Redaction(patterns).call_shown(["alice", "t", {"number": 1, "holder": 2}], {"x": 1})
    assert (arguments, keywords) == (["alice", HIDDEN, {"number": HIDDEN, "holder": 2}], {"x": 1})


def test_secrets_are_found_again_in_texts() -> None:
    secrets = Redaction(["@0", "password"]).secrets(
        ["tok-1"], {"password": ["two\nlines", 123456, True, "no"], "user": "bob"}
    )
    assert (
        scrub("tok-1, two\nlines or two\\nlines, 123456, True, no, bob", secrets)
        == "•••, ••• or •••, •••, True, no, bob"
    )


def test_a_setting_is_a_text_or_a_list() -> None:
    assert words("password, card.*  token") == ("password", "card.*", "token")
    assert load_settings(environ={}, redact=["password", "card.*"]).redact == "password, card.*"
    assert load_settings(environ={"ORCHESTRATOR_REDACT": "a,b"}).redact == "a,b"


def test_a_task_carries_what_is_secret_in_it_and_one_without_carries_nothing() -> None:
    app = Orchestrator(load_settings(environ={}, redact="password"))

    @app.task(redact=("token",))
    def login(user: str, token: str, password: str) -> None: ...

    @app.task
    def plain(user: str) -> None: ...

    assert login._redacting_options.travelling(1.0).redact == ("token", "@1", "@2")
    assert plain._redacting_options.travelling(1.0).redact == ()
    with pytest.raises(InvalidTask, match="Option redact"):
        app.task(redact="token")(lambda token: token)
