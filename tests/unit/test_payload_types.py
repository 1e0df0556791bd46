"""Every type that docs/tasks.md names; types and values that are rejected."""

from __future__ import annotations

import dataclasses
import enum
import re
import time as clock
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from pydantic import HttpUrl, PositiveInt, SecretStr

from orchestrator import InvalidTask, Orchestrator, Payload, PayloadError, Settings
from orchestrator.domain import timezones
from orchestrator.domain.tasks.task import Dispatch, Failed, Succeeded
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.conversion import convert, unchanged_types
from orchestrator.sdk.values.payload import decode_unread, decode_value, encode_call, encode_value
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner

_IN_THE_TABLE = (Collection, Mapping, Sequence, IPv4Address, IPv6Network, date, time)
_DOCUMENT = Path(__file__).parents[2] / "docs" / "tasks.md"
_CODE = re.compile(r"`([^`]+)`")


class Colour(enum.Enum):
    RED = "red"


class Speed(enum.Enum):
    SLOW = 1.5
    FAST = 3.0


class Point(enum.Enum):
    HOME = (0, 0)
    AWAY = (3, 4)


class Mixed(enum.Enum):
    NUMBER = 1
    TEXT = "1"
    NOTHING = None


class Switch(enum.Enum):
    ON = True
    OFF = False


class Price(enum.Enum):
    LOW = Decimal("1.10")


class Day(enum.Enum):
    FIRST = date(2026, 1, 1)
    MOMENT = datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))


class Zero(float, enum.Enum):
    NONE = 0.0


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Opaque(enum.Enum):
    THING = object()


class Alike(enum.Enum):
    NUMBER = Decimal(1)
    TEXT = "1"


@dataclasses.dataclass(frozen=True)
class Trip:
    speed: Speed
    stops: list[Point]
    back: Optional[Trip] = None
    fares: dict[Price, int] = dataclasses.field(default_factory=dict)
    length: float = dataclasses.field(default=0.0, init=False)


class Leg(NamedTuple):
    start: Point
    number: int = 1


class Plan(TypedDict):
    start: Point


class Journey(pydantic.BaseModel):
    start: Point
    speed: Speed
    others: list[Point] = []
    day: Annotated[int, pydantic.Field(gt=0, alias="Day")] = 1


@dataclasses.dataclass
class Passing:
    seed: dataclasses.InitVar[int]
    total: int = 0


class Held(msgspec.Struct):
    start: Point


TRIP = Trip(Speed.SLOW, [Point.AWAY, Point.HOME], Trip(Speed.FAST, []), {Price.LOW: 3})


@dataclasses.dataclass
class Order:
    id: int
    total: Decimal


@dataclasses.dataclass
class Stop:
    id: int


@dataclasses.dataclass
class Loose:
    name: str | bytes


class Row(NamedTuple):
    id: int
    name: str


class Options(TypedDict):
    size: int


class Box(msgspec.Struct):
    id: int


class Person(pydantic.BaseModel):
    name: str


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    when: datetime
    pair: tuple[int, str]
    tags: set[str]
    key: UUID
    colour: Colour
    url: HttpUrl
    secret: SecretStr
    others: list[Person] = []

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def shout(self) -> str:
        return self.pair[1].upper()


class Aliased(pydantic.BaseModel):
    first: int = pydantic.Field(alias="firstNumber")
    second: int = pydantic.Field(validation_alias="in", serialization_alias="out")
    third: int = pydantic.Field(validation_alias=pydantic.AliasPath("deep", "third"))
    inner: Optional[Aliased] = None


STRICT = Strict(
    when=datetime(2026, 1, 1),
    pair=(1, "a"),
    tags={"x"},
    key=UUID(int=1),
    colour=Colour.RED,
    url=HttpUrl("https://example.com/"),
    secret=SecretStr("secret"),
    others=[Person(name="Ada")],
)
ALIASED = Aliased.model_validate({"firstNumber": 1, "in": 2, "deep": {"third": 3}})


@pytest.fixture
def app() -> Orchestrator:
    return Orchestrator(Settings())


def echo(app: Orchestrator, kind: Any, answer: Any = None, **options: Any) -> tuple[Task[..., Any], list[Any]]:
    seen: list[Any] = []

    def function(value: Any) -> Any:
        seen.append(value)
        return value if answer is None else answer

    function.__annotations__ = {"value": kind, "return": kind}
    return app.task(name="echo", **options)(function), seen


def run(app: Orchestrator, task: Task[..., Any], *values: Any) -> Any:
    new = task._new(values, {})
    job = Job(Dispatch(new.id, 1, new.name, new.payload, new.queue, new.options), Bundle("", "", "", 1), 0, 0.0)
    assert job.begin(clock.monotonic())
    return Runner(app, None, Allowed(app, [])).run(job)  # type: ignore[arg-type]


def round_trip(app: Orchestrator, kind: Any, value: Any) -> list[Any]:
    task, seen = echo(app, kind)
    report = run(app, task, value)
    assert isinstance(report, Succeeded), report
    return [*seen, task._signature.restore_result(decode_value(report.result))]


def documented() -> Iterator[tuple[str, str]]:
    """Yield annotations and examples from the table."""
    table = _DOCUMENT.read_text().partition("<!-- types -->")[2].partition("\n\n")[0]
    for line in table.splitlines()[3:]:
        kinds, examples, _ = re.split(r"(?<!\\) \| ", line.strip("| "), maxsplit=2)
        named = [
            kind.replace("\\|", "|") for kind in _CODE.findall(re.sub(r"\([^()`]*`[^`]*`\)|\([^()]*\)$", "", kinds))
        ]
        given = _CODE.findall(examples)
        assert len(named) == len(given), line
        yield from zip(named, given, strict=True)


@pytest.mark.parametrize(("kind", "example"), list(documented()))
def test_each_documented_type_arrives_as_annotated(app: Orchestrator, kind: str, example: str) -> None:
    value = eval(example)
    for arrived in round_trip(app, eval(kind), value):
        assert arrived == value
        assert type(arrived) is type(value)


def test_the_table_of_types_is_read_completely() -> None:
    assert len(list(documented())) > 40


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Strict, STRICT),
        (Aliased, ALIASED),
        (Aliased, ALIASED.model_copy(update={"inner": ALIASED})),
        (dict[str, Strict], {"a": STRICT}),
        (Person | int, Person(name="Ada")),
        (Person | int, 3),
        (Person | None, None),
        (list[HttpUrl | None], [None, HttpUrl("https://a.b/")]),
        (Annotated[int, pydantic.Field(gt=0)], 1),
        (Annotated[int, msgspec.Meta(gt=0)], 1),
        (Annotated[int, "how many"], 1),
        (list[deque[int]], [deque([1])]),
        (deque[Order], deque([Order(1, Decimal(1))])),
        (dict[str, Path], {"a": Path("b")}),
        (Counter[str] | None, Counter("a")),
        (deque, deque([1, "a"])),
        (OrderedDict, OrderedDict(a=1)),
        *((type(member), member) for kind in (Speed, Point, Mixed, Switch, Price, Day) for member in kind),
        (Zero, Zero.NONE),
        (Right, Right.READ | Right.WRITE),
        (list[Point], [Point.AWAY]),
        (dict[str, Speed], {"a": Speed.SLOW}),
        (dict[Price, Speed], {Price.LOW: Speed.SLOW}),
        (dict[Point, int], {Point.AWAY: 1}),
        (Point | None, Point.HOME),
        (Optional[Point], None),
        (Annotated[Point, "where"], Point.HOME),
        (Trip, TRIP),
        (list[Trip], [TRIP]),
        (dict[str, Trip | None], {"a": TRIP, "b": None}),
        (Leg, Leg(Point.AWAY)),
        (Plan, Plan(start=Point.AWAY)),
        (Journey, Journey.model_validate({"start": Point.AWAY, "speed": 1.5, "others": [Point.HOME], "Day": 3})),
        (list[Journey], [Journey(start=Point.AWAY, speed=Speed.SLOW)]),
        (dict[Path, int], {Path("a"): 1}),
        (Mapping[IPv4Address, Path], {IPv4Address("10.0.0.1"): Path("b")}),
        (OrderedDict[Path, int], OrderedDict({Path("a"): 1})),
        (Counter[Path], Counter([Path("a")])),
        (list[dict[Path, deque[int]]], [{Path("a"): deque([1])}]),
    ],
    ids=lambda part: f"{part!r:.40}",
)
def test_further_types_round_trip(app: Orchestrator, kind: Any, value: Any) -> None:
    for arrived in round_trip(app, kind, value):
        assert arrived == value
        assert type(arrived) is type(value)


def test_an_old_pydantic_is_rejected_for_models_with_aliases(
    app: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pydantic, "VERSION", "2.10.6")

    class Day(pydantic.BaseModel):
        number: Annotated[int, pydantic.Field(alias="Number")] = 1

    class Known(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(populate_by_name=True)
        number: Annotated[int, pydantic.Field(alias="Number")] = 1

    class Week(Known):
        days: list[Day] = []

    for kind in (Day, Optional[Day], list[Week]):
        with pytest.raises(InvalidTask, match=r"fields with an alias. These need pydantic 2.11 or newer, found 2.10.6"):
            echo(app, kind)
    echo(app, Known)


def test_list_like_values_are_accepted_for_iterables(app: Orchestrator) -> None:
    for given in (range(3), deque([0, 1, 2]), (0, 1, 2), {0: 1, 1: 1, 2: 1}.keys()):
        assert round_trip(app, Iterable[int], given) == [[0, 1, 2]] * 2
    with pytest.raises(PayloadError, match="Argument 1 of task 'echo' cannot be serialised: .*generator"):
        echo(app, Iterable[int])[0]._new(((number for number in range(3)),), {})


def test_a_default_dictionary_keeps_its_default_factory(app: Orchestrator) -> None:
    (arrived, _) = round_trip(app, defaultdict[str, list[int]], defaultdict(list, a=[1]))
    assert arrived["b"] == []


# -- time zones

BERLIN = ZoneInfo("Europe/Berlin")
TIMES = [
    datetime(2026, 7, 1, 12, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),
    datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/London")),
    datetime(1800, 1, 1, 1, 2, 3, 456789, tzinfo=BERLIN),
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 1),
]


@pytest.mark.parametrize("value", TIMES, ids=str)
def test_a_datetime_keeps_its_time_zone(app: Orchestrator, value: datetime) -> None:
    class Visit(msgspec.Struct):
        when: datetime

    class Model(pydantic.BaseModel):
        when: datetime

    found = [*round_trip(app, datetime, value), *round_trip(app, dict[str, list[datetime]], {"a": [value]})[0]["a"]]
    found.append(round_trip(app, Visit, Visit(value))[0].when)
    found.append(round_trip(app, Model, Model(when=value))[0].when)
    if value.tzinfo is not None:
        found.append(round_trip(app, Any, (1, {"x": value}))[0][1]["x"])
    for arrived in found:
        assert (arrived, arrived.utcoffset(), arrived.fold) == (value, value.utcoffset(), value.fold)
        assert getattr(arrived.tzinfo, "key", None) == getattr(value.tzinfo, "key", None)
    if value.tzinfo is not None:
        assert timezones.decode(timezones.encode({"a": [value]}))["a"][0].tzinfo == (value.tzinfo)


def test_a_key_of_a_mapping_is_the_same_moment_in_utc(app: Orchestrator) -> None:
    value = datetime(2026, 7, 1, 12, tzinfo=BERLIN)
    for arrived in round_trip(app, dict[datetime, int], {value: 7}):
        assert arrived[value] == 7
        assert [key.tzinfo for key in arrived] == [UTC]


def test_a_datetime_in_an_unknown_zone_keeps_its_offset() -> None:
    value = timezones.from_text("2026-01-01T00:00:00+03:00[Nowhere/Land]")
    assert (value.utcoffset(), value.hour) == (timedelta(hours=3), 0)
    for text in ("", "2026[../../etc/passwd]", "x" * 200, "2026-01-01T00:00:00+03:00[a]b"):
        with pytest.raises(ValueError, match=r"time|isoformat|month|ZoneInfo"):
            timezones.from_text(text)


# -- mismatched values


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (int, "1", "Expected `int`, got `str`"),
        (int, True, "Expected `int`, got `bool`"),
        (int, 1.5, "Expected `int`"),
        (str, 1, "Expected `str`, got `int`"),
        (float, "x", "Expected `float`"),
        (bytes, "x", "Expected `bytes`"),
        (list[int], [1, "2"], r"got `str` - at `\$\[1\]`"),
        (dict[str, int], {1: 1}, "Expected `str`"),
        (Order, {"id": 1}, "missing required field"),
        (Order, Order("1", Decimal(1)), r"Expected `int`, got `str` - at `\$.id`"),  # type: ignore[arg-type]
        (datetime, "yesterday", "Invalid RFC3339"),
        (Literal["a"], "b", "Invalid enum value"),
        (Person, {"nom": "x"}, "Field required"),
        (Strict, {"extra": 1}, "Extra inputs are not permitted"),
        (HttpUrl, "not a url", "valid URL"),
        (PositiveInt, -1, "greater than 0"),
        (Annotated[int, msgspec.Meta(gt=0)], -1, "Expected `int` >= 1"),
        (deque[int], ["x"], "Expected `int`"),
        (Path, 1, "Expected `str`"),
        (Iterable[int], 5, "Expected `array`"),
        (Optional[int], "1", "Expected `int | null`"),
        (Speed, 2.5, "Invalid enum value 2.5, expected one of Speed"),
        (Point, [0, 1], r"Invalid enum value \[0, 1\]"),
        (Mixed, True, "Invalid enum value True"),
        (Trip, {"speed": 1.5}, "missing required field `stops`"),
        (Trip, {"speed": 7, "stops": []}, r"Invalid enum value 7, .* at `\$.speed`"),
        (Trip, 5, "Expected `object`"),
        (Journey, {"start": [0, 0]}, "Field required"),
        (Journey, {"start": [0, 9], "speed": 1.5}, "Invalid enum value"),
        (dict[Path, int], {1: 1}, "Expected `str`"),
    ],
    ids=lambda part: f"{part!r:.30}",
)
def test_mismatched_arguments_are_rejected_in_the_caller(app: Orchestrator, kind: Any, value: Any, reason: str) -> None:
    task, _ = echo(app, kind)
    for args, kwargs in (((value,), {}), ((), {"value": value})):
        with pytest.raises(InvalidTask, match=rf"(?s)Task 'echo', argument 'value': expected .*{reason}"):
            task._new(args, kwargs)


@pytest.mark.parametrize(
    ("kind", "given", "answer"), [(int, 1, "1"), (list[int], [1], [1, "2"]), (Person, Person(name="a"), {"nom": 1})]
)
def test_a_mismatched_result_fails_the_attempt_without_retry(
    app: Orchestrator, kind: Any, given: Any, answer: Any
) -> None:
    task, _ = echo(app, kind, answer, retries=3)
    report = run(app, task, given)
    assert isinstance(report, Failed)
    assert not report.retryable
    assert report.error.kind == "orchestrator.errors.PayloadError"
    assert "The result of task 'echo' does not match its annotation: expected" in report.error.message
    function = task.function.__code__
    assert f'File "{function.co_filename}", line ' in report.error.traceback
    assert "/orchestrator/sdk/" not in report.error.traceback, "only the function of the task"
    assert msgspec.json.decode(report.error.data) == {"returned": answer}


def test_the_error_of_a_mismatched_result_names_the_function_and_is_redacted(app: Orchestrator) -> None:
    @app.task(name="card", redact=["pin"])
    def card() -> list[int]:
        return {"pin": "1234", "bank": "b"}  # type: ignore[return-value]

    report = run(app, card)
    assert isinstance(report, Failed)
    assert re.search(r"line \d+, in card\n +def card\(\) -> list\[int\]:\n", report.error.traceback)
    assert "1234" not in str(report.error)
    assert msgspec.json.decode(report.error.data)["returned"]["bank"] == "b"


def test_a_result_that_is_not_stored_is_not_checked(app: Orchestrator) -> None:
    task, _ = echo(app, int, "x", store_result=False)
    assert isinstance(run(app, task, 1), Succeeded)


def test_a_stored_result_that_no_longer_matches_raises_an_error(app: Orchestrator) -> None:
    task, _ = echo(app, int)
    with pytest.raises(PayloadError, match="The result of task 'echo' does not match its annotation: expected int"):
        task._signature.restore_result(decode_value(encode_value("old", "it", 100)))


@pytest.mark.parametrize(
    "kind",
    [
        bool,
        int,
        float,
        str,
        bytes,
        list,
        dict,
        type(None),
        int | None,
        float | int,
        float | None,
        list | dict,
        str | bool,
    ],
    ids=str,
)
def test_plain_data_left_unconverted_equals_its_conversion(kind: Any) -> None:
    plain = (True, 3, 3.5, "a", b"a", [1, "a", [None]], {"a": [1.5]}, None)
    same = [value for value in plain if type(value) in unchanged_types(kind)]
    assert same
    assert [repr(convert(value, kind)) for value in same] == [repr(value) for value in same]


@pytest.mark.parametrize(
    "kind",
    [
        str | UUID,
        int | Colour,
        list[int] | None,
        datetime,
        Annotated[int, "any"],
        PositiveInt,
        Any,
        Payload,
        Literal[1],
    ],
    ids=str,
)
def test_types_that_may_change_values_are_converted(kind: Any) -> None:
    assert unchanged_types(kind) == frozenset()


def test_a_call_of_plain_data_is_not_converted(app: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    def add(number: int, name: str = "", *, share: float | None = None) -> None: ...

    call = [3, "a"], {"share": None}
    monkeypatch.setattr(add._signature, "_restore", lambda *_: pytest.fail("it converted"))
    assert add._signature.restore(*call) == call
    with pytest.raises(pytest.fail.Exception):
        add._signature.restore([3], {"share": 1})  # must become 1.0


def test_simple_annotations_are_checked_without_decoding_the_payload(
    app: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(a: int, b: str, c: float, d: bytes | None, e: list, f: UUID) -> None:  # type: ignore[type-arg]
        del a, b, c, d, e, f

    task = app.task(name="plain")(function)
    monkeypatch.setattr(task._signature, "restore", lambda *_: pytest.fail("it looked"))
    task._new((1, "a", 1, None, [{}], UUID(int=1)), {})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            Opaque,
            "the value of Opaque.THING is not plain data, so it cannot be sent: builtins.object is not plain data",
        ),
        (Alike, "Alike.NUMBER and Alike.TEXT are encoded as the same data, and cannot be told apart"),
        (list[Alike], "are encoded as the same data"),
        (Mixed | None, "None is ambiguous: it is also a member of enum Mixed"),
        (Point | int, "cannot be told apart by their data"),
        (
            Passing,
            "dataclass Passing has an InitVar, 'seed': its value is not stored, so it cannot be sent. Make it a field",
        ),
        (dict[str, Passing], "InitVar, 'seed'"),
        (Held, "field 'start' of Held has a type that msgspec does not support"),
        (Loose, "more than one str-like type"),
        (Order | Stop, "may not contain more than one dataclass"),
        (Order | Trip, "cannot be told apart by their data"),
    ],
    ids=str,
)
def test_types_that_cannot_be_restored_are_rejected_at_registration(app: Orchestrator, kind: Any, reason: str) -> None:
    with pytest.raises(InvalidTask, match=f"Task 'echo', argument 'value': data cannot be turned into .*{reason}"):
        echo(app, kind)


class Tall(Person):
    height: int


class Reserved(pydantic.BaseModel):
    name: str = "nobody"
    secret: str = pydantic.Field("none", exclude=True)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Person, Tall(name="Ada", height=2), Person(name="Ada")),
        (Reserved, Reserved(name="Ada", secret="x"), Reserved(name="Ada", secret="none")),
        (date | str, date(2026, 1, 1), "2026-01-01"),
        (UUID | str, UUID(int=1), str(UUID(int=1))),
        (Path | str, Path("a"), "a"),
        (Path | SecretStr, Path("a"), SecretStr("a")),
    ],
    ids=lambda part: f"{part!r:.30}",
)
def test_ambiguous_types_arrive_as_documented(app: Orchestrator, kind: Any, value: Any, expected: Any) -> None:
    for arrived in round_trip(app, kind, value):
        assert arrived == expected
        assert type(arrived) is type(expected)


@pytest.mark.parametrize("value", [b"abc", "abc", {"rows": [1, 2]}, None, Payload(b"abc")], ids=repr)
def test_a_payload_argument_loads_the_passed_value(value: Any) -> None:
    app = Orchestrator(Settings(database_url="postgresql:///none", redis_url="redis://none"))

    @app.task
    def count(export: Payload | None) -> int:
        return 0

    signature = count._signature
    data = encode_call("count", (value,), {}, 1_000)
    signature.check_types((value,), {}, data)
    [arguments, keywords], _ = decode_unread(data)
    [[given], _] = signature.restore(*signature.load(arguments, keywords))
    expected = value.load() if isinstance(value, Payload) else value
    assert (None if given is None else given.load()) == expected
