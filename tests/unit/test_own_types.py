"""The application's own classes as arguments and results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator import InvalidTask, Orchestrator, PayloadError
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.values import conversion
from orchestrator.sdk.values.payload import decode_call, decode_value, encode_call, encode_value


class Money:
    """An amount, of a type that msgspec does not know."""

    def __init__(self, amount: int, currency: str) -> None:
        self.amount, self.currency = amount, currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and (other.amount, other.currency) == (self.amount, self.currency)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def parse(cls, text: str) -> Money:
        amount, currency = text.split()
        return cls(int(amount), currency)


class Tip(Money):
    """Travels as its base class."""


@dataclass
class Line:
    """Has a field of a registered type."""

    price: Money


@pytest.fixture(autouse=True)
def app() -> Iterator[Orchestrator]:
    app = Orchestrator()
    app.register_type(Money, encode=lambda money: f"{money.amount} {money.currency}", decode=Money.parse)
    yield app
    conversion._codecs.clear()


def pay(one: Money, some: list[Money], maybe: Money | None, named: dict[str, Money], line: Line) -> Money:
    return one


def round_trip(function: Any, *args: Any) -> list[Any]:
    payload = encode_call("pay", args, {}, 10_000)
    signature = Signature("pay", function)
    signature.check_types(args, {}, payload)
    return signature.restore(*decode_call(payload))[0]


def test_registered_types_round_trip() -> None:
    one, two = Money(1, "EUR"), Money(2, "EUR")
    assert round_trip(pay, one, [one, two], None, {"a": two}, Line(one)) == [
        one,
        [one, two],
        None,
        {"a": two},
        Line(one),
    ]
    assert round_trip(pay, one, [], two, {}, Line(one))[2] == two
    assert round_trip(pay, Tip(3, "EUR"), [], None, {}, Line(one))[0] == Money(3, "EUR")
    data = encode_value(two, "The result", 1_000)
    assert decode_value(data) == "2 EUR"
    assert Signature("pay", pay).restore_result(decode_value(data)) == two


def test_mismatched_and_unregistered_types_are_rejected() -> None:
    with pytest.raises(InvalidTask, match="argument 'one'"):
        round_trip(pay, "nothing", [], None, {}, Line(Money(1, "EUR")))
    conversion._codecs.clear()
    with pytest.raises(PayloadError, match="Money is not plain data"):
        encode_value(Money(1, "EUR"), "The result", 1_000)


@pytest.mark.parametrize("kind", [Line, int, dict])
def test_supported_types_cannot_be_registered(app: Orchestrator, kind: type) -> None:
    with pytest.raises(InvalidTask, match=f"{kind.__name__} is supported already"):
        app.register_type(kind, encode=str, decode=kind)
