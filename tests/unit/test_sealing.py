"""Values sealed with AES-256-GCM, and errors where they cannot be opened."""

from __future__ import annotations

import base64
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from orchestrator import Settings, sealing
from orchestrator.domain import timezones
from orchestrator.domain.sealed import open_error, renewed_error, renewed_inside, renewed_value, seal_error
from orchestrator.domain.tasks.callbacks import Callback, Callbacks, after_end, after_success
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import ConfigurationError, WrongState
from orchestrator.sdk.code.messages import with_legible_errors
from orchestrator.sdk.values.display import call_of, stored_value
from orchestrator.sdk.values.payload import decode_call, decode_value, encode_call, encode_value
from orchestrator.sdk.waiting.steps import Steps, complete
from orchestrator.sealing import CALL, VALUE, Sealed, Vault, is_sealed, vault_of
from orchestrator.store.insights.runs import readable_params, shown_params


def key(id: str, letter: bytes = b"k") -> str:
    return f"{id}:{base64.b64encode(letter * 32).decode()}"


def vault(*keys: str, namespace: str = "orchestrator") -> Vault:
    found = vault_of(Settings(namespace=namespace, data_keys=",".join(keys)))
    assert found is not None
    return found


@pytest.fixture
def unit_vault() -> Vault:
    return vault(key("unit-1"))


def test_sealed_values_round_trip(unit_vault: Vault) -> None:
    value = {"text": "secret", "at": datetime(2026, 1, 1, tzinfo=UTC), "many": list(range(100))}
    data = unit_vault.seal(VALUE, encode_value(value, "it", 10_000))
    assert is_sealed(data)
    assert b"secret" not in data
    assert decode_value(data) == value
    call = unit_vault.seal(CALL, encode_call("t", ["secret"], {"a": 1}, 1_000))
    assert decode_call(call) == [["secret"], {"a": 1}]
    assert call_of(call) == (["secret"], {"a": 1})
    assert unit_vault.seal(CALL, call) == call, "nothing is sealed twice"


def test_sealing_a_value_twice_gives_different_bytes(unit_vault: Vault) -> None:
    assert unit_vault.seal(VALUE, b"\xc3") != unit_vault.seal(VALUE, b"\xc3")


def test_sealed_arguments_and_results_cannot_be_exchanged(unit_vault: Vault) -> None:
    with pytest.raises(Sealed, match="a different place"):
        decode_value(unit_vault.seal(CALL, b"\xc3"))
    with pytest.raises(Sealed, match="a different place"):
        decode_call(unit_vault.seal(VALUE, b"\x92\x90\x80"))


@pytest.mark.slow
def test_sealed_values_cannot_be_opened_in_another_namespace() -> None:
    theirs = vault(key("unit-n"), namespace="theirs").seal(VALUE, b"\xc3")
    script = f"""
from orchestrator import Settings
from orchestrator.sealing import vault_of, Sealed
from orchestrator.sdk.values.payload import decode_value
vault_of(Settings(namespace="ours", data_keys={key("unit-n")!r}))
try:
    decode_value({theirs!r})
except Sealed as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "cannot be decrypted" in said


def test_an_altered_value_is_not_opened(unit_vault: Vault) -> None:
    data = unit_vault.seal(VALUE, b"\xc3")
    with pytest.raises(Sealed, match="was changed"):
        decode_value(data[:-1] + bytes([data[-1] ^ 1]))
    assert "was changed" in stored_value(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_missing_key_is_named(unit_vault: Vault) -> None:
    data = unit_vault.seal(VALUE, b"\xc3").replace(b"unit-1", b"unit-9")
    with pytest.raises(Sealed, match="'unit-9'"):
        decode_value(data)
    assert stored_value(data) == "(sealed with key unit-9)"
    kept = timezones.decode(data)
    assert timezones.encode(kept) == data, "who only copies it needs no key"


def test_a_sealed_value_may_be_part_of_another_value(unit_vault: Vault) -> None:
    data = unit_vault.seal(VALUE, encode_value("secret", "it", 100))
    payload = b"\x92\x91" + data + b"\x80"
    assert decode_call(payload) == [["secret"], {}]
    assert timezones.decode(payload) == [["secret"], {}]
    (task,) = after_success(bytes(16), 1, Callbacks("t", success=(Callback("c", "q"),)), data)
    assert decode_call(task.payload) == [["secret"], {}]


def test_a_sealed_error_reveals_only_its_kind(unit_vault: Vault) -> None:
    error = TaskError("ValueError", "a secret", "File …, secret", '{"known":"secret"}')
    sealed = seal_error(error, unit_vault)
    assert sealed.kind == "ValueError"
    assert "secret" not in sealed.to_json()
    assert open_error(sealed) == error
    assert open_error(error) == error
    assert seal_error(sealed, unit_vault) == sealed
    (task,) = after_end(bytes(16), 1, Callbacks("t", failure=(Callback("c", "q"),)), sealed)
    assert b"secret" not in task.payload
    ((failure,), _) = decode_call(task.payload)
    assert (failure["message"], failure["data"]) == ("a secret", {"known": "secret"})


def test_a_text_that_only_looks_sealed_stays_a_text(unit_vault: Vault) -> None:
    for text in ("sealed: it is not", "sealed:", "sealed:AAAA"):
        assert sealing.open_text(text) == text
        assert sealing.open_text(unit_vault.seal_text(text)) == text


def test_json_is_sealed_as_json(unit_vault: Vault) -> None:
    text = unit_vault.seal_json('{"word":"secret"}')
    assert sealing.open_json(msgspec.json.decode(text)) == {"word": "secret"}
    assert sealing.open_json({"word": 1}) == {"word": 1}
    assert unit_vault.seal_json(text) == text


def test_a_leading_plain_key_opens_values_but_seals_none() -> None:
    assert vault_of(Settings(data_keys=f"plain,{key('unit-p')}")) is None
    data = vault(key("unit-p")).seal(VALUE, b"\xc3")
    assert decode_value(data) is True


def test_an_old_key_opens_and_the_first_key_seals() -> None:
    old, new = vault(key("unit-a", b"a")), vault(key("unit-b", b"b"), key("unit-a", b"a"))
    data = old.seal(VALUE, encode_value("secret", "it", 100))
    assert decode_value(data) == "secret"
    again = renewed_value(new, VALUE, data)
    assert b"unit-b" in again
    assert b"unit-a" not in again
    assert decode_value(again) == "secret"
    assert renewed_value(new, VALUE, again) == again
    assert decode_value(renewed_value(new, VALUE, encode_value("plain", "it", 100))) == "plain"


def test_nested_sealed_values_are_renewed_too() -> None:
    old, new = vault(key("unit-a", b"a")), vault(key("unit-b", b"b"), key("unit-a", b"a"))
    value = old.seal(VALUE, encode_value("secret", "it", 100))
    payload = b"\x92\x91" + value + b"\x80"
    again = renewed_value(new, CALL, payload)
    assert decode_call(again) == [["secret"], {}]
    inner = sealing.open_data(again, CALL)
    assert b"unit-a" not in inner
    texts = msgspec.msgpack.encode({"reasons": {1: old.seal_text("why")}, "data": value})
    assert b"unit-a" not in renewed_inside(new, texts)
    error = seal_error(TaskError("E", "m", "t", '{"k":1}'), old)
    renewed = renewed_error(new, error)
    assert open_error(renewed) == TaskError("E", "m", "t", '{"k":1}')
    assert renewed_error(new, renewed) == renewed


@pytest.mark.parametrize(
    "given",
    ["nocolon", key("a b"), f"{key('x')},{key('x')}", "id:short", "id:!!!", key("x" * 33)],
    ids=["no id", "space", "twice", "short", "no base64", "long id"],
)
def test_invalid_keys_are_rejected(given: str) -> None:
    with pytest.raises(ConfigurationError, match="data_keys|data key"):
        vault_of(Settings(data_keys=given))


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(key("unit-f") + "\n" + key("unit-g") + "\n")
    found = vault_of(Settings(data_keys_file=str(path)))
    assert found is not None
    assert found.key == "unit-f"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        vault_of(Settings(data_keys_file=str(tmp_path / "none")))
    with pytest.raises(ConfigurationError, match="both set"):
        vault_of(Settings(data_keys=key("x"), data_keys_file=str(path)))


def test_settings_do_not_show_keys() -> None:
    assert key("x") not in repr(Settings(data_keys=key("x")))


@pytest.mark.slow
def test_without_keys_no_cryptography_is_loaded() -> None:
    script = (
        "import sys, orchestrator, orchestrator.sdk.app, orchestrator.workers.process, orchestrator.scheduler.loop;"
        "print('cryptography.hazmat.primitives.ciphers.aead' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


def test_sealed_texts_within_texts_are_opened_or_described(unit_vault: Vault) -> None:
    text = unit_vault.seal_text('said "no"\n')
    stray = "sealed:" + base64.b64encode(Vault("elsewhere", {"stray": b"s" * 32}).seal(VALUE, b"\xa1x")).decode()
    del sealing._ciphers["stray"]
    assert sealing.legible(f"E: {text}; {stray}") == 'E: said "no"\n; (sealed with key stray)'
    document = msgspec.json.encode({"a": text, "b": [stray], "c": "sealed:nothing"})
    revealed = msgspec.json.decode(sealing.reveal_json(document))
    assert revealed == {"a": 'said "no"\n', "b": [stray], "c": "sealed:nothing"}
    described = msgspec.json.decode(sealing.describe_json(document))  # a server does not open texts that clients sent
    assert described["a"].startswith("(sealed with key ")
    assert described["b"] == ["(sealed with key stray)"]
    assert described["c"] == "sealed:nothing"


def stray_text(plain: bytes) -> str:
    """Return a text sealed with a missing key."""
    text = "sealed:" + base64.b64encode(Vault("elsewhere", {"stray": b"s" * 32}).seal(VALUE, plain)).decode()
    del sealing._ciphers["stray"]
    return text


def test_errors_describe_texts_that_cannot_be_opened() -> None:
    def refusing() -> Steps[bytes]:
        yield from ()
        raise WrongState(f"The update 'pay' failed: ValueError: {stray_text(b'x')}")

    with pytest.raises(WrongState, match=r"ValueError: \(sealed with key stray\)$"):
        complete(with_legible_errors(refusing()))


def test_parameters_of_a_run_are_shown_like_other_values(unit_vault: Vault) -> None:
    sealed = unit_vault.seal_text('{"word": "xyzzy"}')
    assert readable_params(shown_params(sealed)) == {"word": "xyzzy"}
    stray = shown_params(stray_text(msgspec.msgpack.encode('{"word": "xyzzy"}')))
    assert readable_params(stray) == "(sealed with key stray)"
    described = msgspec.json.decode(sealing.describe_json(msgspec.json.encode(stray)))
    assert readable_params(described) == "(sealed with key stray)"
    sent = msgspec.json.encode(dict.fromkeys(stray, sealed))
    assert readable_params(msgspec.json.decode(sealing.reveal_json(sent))) == {"word": "xyzzy"}
    assert readable_params({"sealed": "{}"}) == {"sealed": "{}"}
