"""Arguments and results arrive in the annotated types; values that cannot be accepted fail in the caller."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any, Literal, Optional
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from orchestrator import (
    ConfigurationError,
    InvalidTask,
    Orchestrator,
    PayloadError,
    Retry,
    Settings,
    UnknownOption,
    UnknownTask,
    as_completed,
    gather,
)
from orchestrator.domain.plain import MAX_LEVELS
from orchestrator.domain.tasks.task import Dispatch, Failed, NewTask, Succeeded
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values import payload
from orchestrator.sdk.values.payload import convert, decode_value, encode_call, encode_value
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running import task_runtime as runtime
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.emptying import empty
from tests.outbox import ClosedOutbox, KeptOutbox


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    when: datetime
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Shape:
    points: list[Point]
    by_name: dict[str, Point]
    owner: UUID | None = None
    price: Decimal = Decimal(0)
    colour: Colour = Colour.RED


class Box(msgspec.Struct):
    id: UUID
    weight: Decimal
    inside: list[Point] = []


class Person(pydantic.BaseModel):
    name: str
    born: date
    seen: datetime
    key: UUID
    photo: bytes = b"\xff\x00"
    balance: Decimal = Decimal("1.10")
    friends: list[Person] = []


@dataclasses.dataclass
class Household:
    people: list[Person]
    head: Person | None = None


NAIVE = datetime(2026, 11, 15, 1, 2, 3, 456789)
AWARE = NAIVE.replace(tzinfo=UTC)
ELSEWHERE = NAIVE.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))
KEY = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
POINT = Point(1, NAIVE, "a")
PERSON = Person(name="Ada", born=date(1815, 12, 10), seen=AWARE, key=KEY)
FRIENDLY = Person(name="Charles", born=date(1791, 12, 26), seen=NAIVE, key=KEY, photo=b"", friends=[PERSON])

ROUND_TRIPS: list[tuple[Any, Any]] = [
    (None, None),
    (True, bool),
    (-(2**63), int),
    (2**64 - 1, int),
    (1.5, float),
    (math.inf, float),
    ("ä\0\n\U0001f600", str),
    ("", str),
    ([1, "a", None, [True]], list[Any]),
    ({"a": {"b": [1]}}, dict[str, Any]),
    ({1: "a"}, dict[int, str]),
    ((1, "a"), tuple[int, str]),
    ({1, 2}, set[int]),
    ("fast", Literal["fast", "slow"]),
    (NAIVE, datetime),
    (AWARE, datetime),
    (ELSEWHERE, datetime),
    (NAIVE.date(), date),
    (time_of_day(1, 2, 3), time_of_day),
    (timedelta(days=-1, microseconds=7), timedelta),
    (KEY, UUID),
    (Decimal("1.10"), Decimal),
    (Decimal("-1E+30"), Decimal),
    (b"\x00\xff", bytes),
    (b"", bytes),
    (bytearray(b"ab"), bytearray),
    (Colour.RED, Colour),
    (Level.HIGH, Level),
    (POINT, Point),
    ([POINT, POINT], list[Point]),
    ({"a": [POINT]}, dict[str, list[Point]]),
    (Shape([POINT], {"p": POINT}, KEY, Decimal("9.99")), Shape),
    (Box(KEY, Decimal("0.1"), [POINT]), Box),
    ([Box(KEY, Decimal(1))], list[Box]),
    (PERSON, Person),
    (FRIENDLY, Person),
    ([PERSON, FRIENDLY], list[Person]),
    (Household([PERSON], FRIENDLY), Household),
    (None, Optional[Point]),
    (POINT, Optional[Point]),
    (None, datetime | None),
    (NAIVE, datetime | None),
    (AWARE, datetime | None),
    ([None, KEY], list[UUID | None]),
    ({KEY: AWARE}, dict[UUID, datetime]),
]


def job_for(new: NewTask) -> Job:
    dispatch = Dispatch(new.id, 1, new.name, new.payload, new.queue, new.options)
    job = Job(dispatch, Bundle("", "", "", 1), 0, time.monotonic())
    assert job.begin(time.monotonic())
    return job


@pytest.fixture
def app() -> Orchestrator:
    """An application without services: any attempt to write fails with ConfigurationError."""
    return Orchestrator(Settings(max_payload=10_000))


def echo_task(app: Orchestrator, kind: Any, seen: list[Any]) -> Task[..., Any]:
    def echo(value: Any) -> Any:
        seen.append(value)
        return value

    echo.__annotations__ = {"value": kind, "return": kind}
    return app.task(name="echo")(echo)


@pytest.mark.parametrize(("value", "kind"), ROUND_TRIPS, ids=lambda part: f"{part!r:.40}")
@pytest.mark.parametrize("named", [False, True], ids=["positional", "named"])
def test_values_round_trip_through_a_task(app: Orchestrator, value: Any, kind: Any, named: bool) -> None:
    """Caller → payload → worker → function → result → caller."""
    seen: list[Any] = []
    task = echo_task(app, kind, seen)
    new = task._new((), {"value": value}) if named else task._new((value,), {})
    report = Runner(app, ClosedOutbox(), Allowed(app, [])).run(job_for(new))
    assert isinstance(report, Succeeded), report
    returned = task._signature.restore_result(decode_value(report.result))
    for arrived in (*seen, returned):
        assert arrived == value
        assert type(arrived) is type(value)


@pytest.mark.slow
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.binary()
        # A lone surrogate is rejected, below.
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
        max_leaves=20,
    )
)
def test_plain_data_needs_no_annotation(value: Any) -> None:
    task = Orchestrator(Settings()).task(name="t")(lambda value: value)
    ((arrived,), _) = task._signature.restore(*decode_value(task._new((value,), {}).payload))
    assert arrived == value


def test_variable_arguments_are_converted_one_by_one(app: Orchestrator) -> None:
    def collect(*points: Point, **ids: UUID) -> list[Any]:
        assert points == (POINT, POINT)
        assert ids == {"a": KEY}
        return []

    task = app.task(name="collect")(collect)
    assert isinstance(
        Runner(app, ClosedOutbox(), Allowed(app, [])).run(job_for(task._new((POINT, POINT), {"a": KEY}))), Succeeded
    )


def test_a_mismatched_argument_fails_the_task_without_retry(app: Orchestrator) -> None:
    """For example in a workflow step, whose input could not be compared with the signature before."""
    task = app.task(name="typed", retries=3)(_typed)
    unfit = msgspec.structs.replace(task._new((1,), {}), payload=encode_value((["not a number"], {}), "it", 100))
    report = Runner(app, ClosedOutbox(), Allowed(app, [])).run(job_for(unfit))
    assert isinstance(report, Failed)
    assert not report.retryable
    assert "'typed', argument 'number': expected int" in report.error.message


def _typed(number: int) -> int:
    return number


def test_a_result_that_cannot_be_serialized_fails_the_task(app: Orchestrator) -> None:
    report = Runner(app, ClosedOutbox(), Allowed(app, [])).run(
        job_for(app.task(name="odd")(lambda: object())._new((), {}))
    )
    assert isinstance(report, Failed)
    assert "The result of task 'odd' cannot be serialised" in report.error.message


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "result",
    ["\ud800", 10**30, nested(10_000), nested(900), {"k": object()}, b"x" * 10_001],
    ids=["a surrogate", "a huge number", "ten thousand levels", "nine hundred levels", "an object", "too much"],
)
def test_a_result_that_cannot_be_stored_fails_the_task_without_retry(app: Orchestrator, result: Any) -> None:
    task = app.task(name="odd", retries=5)(lambda: result)
    report = Runner(app, ClosedOutbox(), Allowed(app, [])).run(job_for(task._new((), {})))
    assert isinstance(report, Failed)
    assert not report.retryable
    assert "The result of task 'odd'" in report.error.message


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def endless_group() -> Exception:
    error: Exception = ValueError("first")
    for _ in range(2_000):
        error = ExceptionGroup("group", [error])
    return error


def long_chain() -> Exception:
    error = ValueError("first")
    for number in range(5_000):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following
    return error


@pytest.mark.parametrize(
    "error",
    [
        Unprintable(),
        endless_group(),
        long_chain(),
        ValueError("a\0b\ud800"),
        ValueError("x" * 10_000_000),
        ValueError(loop()),
        type("Strange", (Exception,), {"__module__": None, "__qualname__": "a\udfffb"})("x"),
        SystemExit("\0"),
    ],
    ids=["unprintable", "a group of groups", "a long chain", "NUL", "ten megabytes", "itself", "its name", "an exit"],
)
def test_any_exception_of_a_task_can_be_reported(app: Orchestrator, error: BaseException) -> None:
    def fail() -> None:
        raise error

    report = Runner(app, ClosedOutbox(), Allowed(app, [])).run(job_for(app.task(name="fails")(fail)._new((), {})))
    assert isinstance(report, Failed)
    sent = msgspec.msgpack.encode(report)
    assert len(sent) < 100_000
    assert b"\0" not in (report.error.kind + report.error.message + report.error.traceback).encode()


def test_a_task_cannot_enqueue_more_than_a_message_holds(app: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_MAX_ENQUEUED", 100_000)
    inner = app.task(name="inner")(lambda text: text)
    outbox = KeptOutbox()
    for options in ({}, {"on_success": True}):
        outer = app.task(name=f"outer{len(options)}")(
            lambda options=options: app.enqueue_many(inner.options(**options), [("x" * 9_000,)] * 12)
        )
        report = Runner(app, outbox, Allowed(app, [])).run(job_for(outer._new((), {})))
        assert isinstance(report, Failed)
        assert "12 tasks with" in report.error.message
    assert outbox.tasks == []


# -- calls that are rejected


def resize(path: str, width: int = 100, *, exact: bool = False) -> str:
    return f"{path}{width}{exact}"


BAD_ARGUMENTS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("an object", (object(),), {}, PayloadError, "Argument 1 of task 'resize' cannot be serialised: builtins.object"),
    ("a function", ("a", len), {}, PayloadError, "Argument 2 of task 'resize' .*builtin_function"),
    ("a class", (Person,), {}, PayloadError, "Argument 1 of task 'resize' cannot be serialised"),
    ("an object inside", ("a",), {"width": {"k": [object()]}}, PayloadError, "Argument width of task 'resize'"),
    ("a generator", ((part for part in "ab"),), {}, PayloadError, "Argument 1 .*generator is not plain data"),
    ("an open file", (open,), {}, PayloadError, "Argument 1 of task 'resize' cannot be serialised"),
    ("an exception", (ValueError("x"),), {}, PayloadError, "ValueError is not plain data"),
    ("a huge integer", (2**64,), {}, PayloadError, "Argument 1 of task 'resize' cannot be serialised"),
    ("a lone surrogate", ("\ud800",), {}, PayloadError, "Argument 1 .*surrogates"),
    ("a surrogate key", ({"\udfff": 1},), {}, PayloadError, "Argument 1 .*surrogates"),
    ("deep nesting", (nested(10_000),), {}, PayloadError, "Argument 1 .*recursion"),
    ("a loop", ("a", loop()), {}, PayloadError, "Argument 2 .*recursion"),
    (
        "too much",
        ("x" * 10_001,),
        {},
        PayloadError,
        "arguments of task 'resize': 10,0.. bytes, .* 10,000 .*max_payload",
    ),
    ("too few", (), {}, InvalidTask, r"Task 'resize': missing a required argument: 'path'.* resize\(path"),
    ("too many", ("a", 1, True), {}, InvalidTask, "Task 'resize': too many positional arguments"),
    ("an unknown name", ("a",), {"widht": 1}, InvalidTask, "Task 'resize': got an unexpected keyword .*'widht'"),
    ("one twice", ("a",), {"path": "b"}, InvalidTask, "Task 'resize': multiple values for argument 'path'"),
    ("keyword only", ("a", 1, True), {}, InvalidTask, "Task 'resize': too many positional"),
]
bad_arguments = pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [case[1:] for case in BAD_ARGUMENTS],
    ids=[c[0] for c in BAD_ARGUMENTS],
)


@bad_arguments
def test_invalid_arguments_are_rejected(
    app: Orchestrator, arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    task = app.task(name="resize")(resize)
    for call in (task.enqueue, task.delay, lambda *a, **k: app.enqueue("resize", *a, **k)):
        with pytest.raises(error, match=message):
            call(*arguments, **keywords)
    call_as_data = {**dict(zip(["path", "width"], arguments, strict=False)), **keywords} if keywords else arguments
    if not (keywords and "path" in keywords):
        with pytest.raises(error):
            app.enqueue_many(task, [("good.png",), call_as_data])


@pytest.mark.parametrize(
    "bad", ["de", b"de", bytearray(b"de"), 7, None, {"de"}, iter(["de"])], ids=lambda bad: type(bad).__name__
)
def test_an_invalid_call_in_a_bulk_enqueue_is_named_by_its_index(app: Orchestrator, bad: Any) -> None:
    task = app.task(name="spread")(lambda *names: names)
    wanted = r"Task 'spread', calls\[2\]: expected the arguments of one call, .*; found .*\(value,\)\."
    with pytest.raises(InvalidTask, match=wanted):
        app.enqueue_many(task, [("a",), ["b"], bad])
    with pytest.raises(InvalidTask, match=wanted):
        asyncio.run(app.aenqueue_many(task, [("a",), {}, bad]))
    calls: list[Any] = [("a",), range(2), bad]
    inside = app.task(name="inside")(lambda: str(app.enqueue_many(task, calls)))
    report = Runner(app, KeptOutbox(), Allowed(app, [])).run(job_for(inside._new((), {})))
    assert isinstance(report, Failed)
    assert re.search(wanted, report.error.message)


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    "value",
    [
        time_of_day(1, tzinfo=BERLIN),
        [time_of_day(1, 2, 3, 4, tzinfo=BERLIN)],
        {"a": {"b": (time_of_day(1, tzinfo=BERLIN),)}},
    ],
    ids=["time", "microseconds", "nested"],
)
def test_a_time_of_day_with_a_named_zone_is_rejected(app: Orchestrator, value: Any) -> None:
    task = app.task(name="opens")(lambda at: at)
    with pytest.raises(PayloadError, match=r"Argument 1 of task 'opens'.* has the zone Europe/Berlin.* a datetime, or"):
        task.enqueue(value)
    with pytest.raises(PayloadError, match=r"The result.* has the zone Europe/Berlin"):
        encode_value(value, "The result", 1_000)


@pytest.mark.parametrize("seconds", [7, -7, 31, 18_007, -18_007.5])
@pytest.mark.parametrize("microsecond", [0, 3])
def test_a_time_of_day_whose_offset_has_seconds_is_refused(seconds: float, microsecond: int) -> None:
    value = time_of_day(1, 2, 3, microsecond, timezone(timedelta(seconds=seconds)))
    with pytest.raises(PayloadError, match=r"The result.* the time 01:02:03.* has an offset with seconds"):
        encode_value({"a": [value]}, "The result", 1_000)


@pytest.mark.parametrize(
    "value", [time_of_day(1), time_of_day(1, tzinfo=UTC), time_of_day(1, 2, 3, 4, timezone(timedelta(hours=2)))]
)
def test_times_of_day_without_a_named_zone_round_trip(value: time_of_day) -> None:
    assert convert(decode_value(encode_value(value, "it", 1_000)), time_of_day) == value
    assert decode_value(encode_value({"01:00:00": [value, "01:00:00"]}, "it", 1_000))["01:00:00"][1] == "01:00:00"


def test_an_invalid_list_of_calls_is_rejected(app: Orchestrator) -> None:
    task: Any = app.task(name="spread")(lambda *names: names)
    calls: Any = 7
    numbered: Any = {1: 2}
    with pytest.raises(InvalidTask, match="Task 'spread': expected a list of calls, .* found 7"):
        app.enqueue_many(task, calls)
    with pytest.raises(InvalidTask, match=r"Task 'spread': keywords must be strings"):
        app.enqueue_many(task, [numbered])


def test_a_keyword_that_utf8_cannot_encode_is_rejected(app: Orchestrator) -> None:
    with pytest.raises(PayloadError, match=r"The arguments of task 'any' cannot be serialised.*surrogates"):
        app.task(name="any")(lambda **names: names).enqueue(**{"\ud800": 1})


def test_a_valid_call_reaches_the_database(app: Orchestrator) -> None:
    """A valid call fails only there, so the rejected calls above did not try to write."""
    with pytest.raises(ConfigurationError, match="database_url|redis_url"):
        app.task(name="resize")(resize).enqueue("a.png")


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"retires": 3}, UnknownOption, "Unknown task option 'retires'. Did you mean 'retries'"),
    ({"timeuot": 3}, UnknownOption, "Unknown task option 'timeuot'. Did you mean 'timeout'"),
    ({"xyzzy": 3}, UnknownOption, "Unknown task option 'xyzzy'. Known: queue, priority, delay"),
    ({"delay": -1}, InvalidTask, "Option delay: expected zero or more seconds, found -1"),
    ({"delay": -1e-9}, InvalidTask, "Option delay"),
    ({"delay": timedelta(seconds=-1)}, InvalidTask, "Option delay: .*timedelta"),
    ({"delay": math.nan}, InvalidTask, "Option delay: .*found nan"),
    ({"delay": math.inf}, InvalidTask, "Option delay: .*found inf"),
    ({"delay": 1e300}, InvalidTask, "Option delay: .*a hundred years"),
    ({"delay": 10**400}, InvalidTask, "Option delay: .*a hundred years"),
    ({"delay": timedelta.max}, InvalidTask, "Option delay: .*a hundred years"),
    ({"delay": True}, InvalidTask, "Option delay: .*found True"),
    ({"delay": "60"}, InvalidTask, "Option delay: .*found '60'"),
    ({"delay": None}, InvalidTask, "Option delay: .*found None"),
    ({"timeout": 0}, InvalidTask, "Option timeout: expected more than zero seconds, found 0"),
    ({"timeout": -5}, InvalidTask, "Option timeout"),
    ({"timeout": math.nan}, InvalidTask, "Option timeout"),
    ({"timeout": math.inf}, InvalidTask, "Option timeout"),
    ({"timeout": True}, InvalidTask, "Option timeout: .*found True"),
    ({"timeout": "5"}, InvalidTask, "Option timeout"),
    ({"retries": -1}, InvalidTask, "Option retries: .*found -1"),
    ({"retries": True}, InvalidTask, "Option retries: .*found True"),
    ({"retries": 1.5}, InvalidTask, "Option retries"),
    ({"retries": "3"}, InvalidTask, "Option retries: .*found '3'"),
    ({"retries": None}, InvalidTask, "Option retries"),
    ({"retries": 10**30}, InvalidTask, "Option retries"),
    ({"queue": ""}, InvalidTask, "A queue name has 1 to 128 letters.*found ''"),
    ({"queue": "a b"}, InvalidTask, "A queue name .*found 'a b'"),
    ({"queue": "a\n"}, InvalidTask, "A queue name"),
    ({"queue": "a\0"}, InvalidTask, "A queue name"),
    ({"queue": "a,b"}, InvalidTask, "A queue name"),
    ({"queue": "q" * 129}, InvalidTask, "A queue name"),
    ({"queue": 7}, InvalidTask, "A queue name"),
    ({"isolation": "container"}, InvalidTask, "Option isolation: expected 'thread' or 'process', found 'container'"),
    ({"isolation": None}, InvalidTask, "Option isolation"),
    ({"priority": 101}, InvalidTask, "Option priority: expected a whole number from -100 to 100, found 101"),
    ({"priority": -101}, InvalidTask, "Option priority"),
    ({"priority": 10**9}, InvalidTask, "Option priority"),
    ({"priority": 1.0}, InvalidTask, "Option priority"),
    ({"priority": True}, InvalidTask, "Option priority: .*found True"),
    ({"priority": "high"}, InvalidTask, "Option priority: .*found 'high'"),
    ({"on_success": "no"}, InvalidTask, "Option on_success: expected a task, or a list of tasks, found 'no'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=lambda part: f"{part!r:.50}")
def test_invalid_options_are_rejected(
    app: Orchestrator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """On the decorator, and in a call."""
    with pytest.raises(error, match=message):
        app.task(name="resize", **options)(resize)
    assert not app.tasks
    with pytest.raises(error, match=message):
        app.task(name="resize")(resize).options(**options)


def test_valid_options_are_stored_with_the_task(app: Orchestrator) -> None:
    task = app.task(
        name="resize", queue="images/a", priority=-100, retries=Retry(max=2, base=0.5), timeout=timedelta(minutes=1)
    )(resize)
    new = task.options(delay=timedelta(hours=1), isolation="process", priority=100)._new(("a",), {})
    assert (new.queue, new.priority, new.delay) == ("images/a", 100, 3600.0)
    job = job_for(new)
    assert (job.options.retry, job.options.timeout, job.options.isolation) == (
        task._call_options.policy,
        60.0,
        "process",
    )
    assert (job.options.retry.max, job.options.retry.base) == (2, 0.5)
    assert app.task(name="resize")(resize)._new(("a",), {}).options is None


def test_an_unknown_task_gets_a_suggestion(app: Orchestrator) -> None:
    app.task(name="images.resize")(resize)
    with pytest.raises(UnknownTask, match=r"'images.risize'. Did you mean 'images.resize'\? Known: images.resize."):
        app.enqueue("images.risize", "a.png")
    with pytest.raises(UnknownTask, match=r"No task is called 'xyzzy'. Known: images.resize."):
        app.enqueue("xyzzy")


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "nul\0", "\ud800", 7, "a,b"])
def test_invalid_task_names_are_rejected(app: Orchestrator, name: Any) -> None:
    with pytest.raises(InvalidTask, match="A task name has 1 to 128 letters"):
        app.task(name=name)(resize)


def test_a_task_name_can_be_registered_only_once(app: Orchestrator) -> None:
    app.task(name="same")(resize)
    with pytest.raises(InvalidTask, match="Task name 'same' is registered twice"):
        app.task(name="same")(_typed)


# -- on_success


def test_on_success_is_rejected_outside_a_task(app: Orchestrator) -> None:
    task = app.task(name="resize", on_success=True)(resize)
    calls: list[Callable[[], object]] = [
        lambda: task.enqueue("a"),
        lambda: app.enqueue_many(task, [("a",)]),
        lambda: app.start_many(task, ["a"]),
        lambda: task.enqueue_in(None, "a"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(InvalidTask, match="Option on_success"):
            call()


def test_on_success_calls_in_a_task_wait_for_its_success(app: Orchestrator) -> None:
    task = app.task(name="resize")(resize)
    later = task.options(on_success=True)
    job, gathered = job_for(task._new(("a",), {})), KeptOutbox()
    enter_task(JobRuntime(job, gathered))
    try:
        later.enqueue("1")
        app.enqueue_many(later, [("2",), ("3",)])
        task.enqueue("4")
        app.enqueue_many(task, [("5",)])
    finally:
        enter_task(None)
    assert [decode_value(new.payload)[0][0] for new in job.children] == ["1", "2", "3"]
    assert [decode_value(new.payload)[0][0] for new in gathered.tasks] == ["4", "5"]
    assert len({new.id for new in [*job.children, *gathered.tasks]}) == 5


# -- failed calls write nothing


@pytest.fixture
def live_app(database_url: str, redis_url: str) -> Iterator[Orchestrator]:
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.begin() as connection:
        empty(connection)  # rows of other tests
    engine.dispose()
    app = Orchestrator(Settings(database_url=database_url, redis_url=redis_url, max_payload=10_000))
    yield app
    app.close()


def rows(database_url: str) -> tuple[int, int]:
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.connect() as connection:
        counts = [
            connection.execute(text(f"SELECT count(*) FROM orchestrator.{t}")).scalar_one() for t in ("tasks", "runs")
        ]
    engine.dispose()
    return counts[0], counts[1]


@pytest.mark.slow
def test_one_invalid_call_among_thousands_writes_nothing(live_app: Orchestrator, database_url: str) -> None:
    """The invalid call comes after the first chunk has been copied."""
    task = live_app.task(name="resize")(resize)
    for bad, error in [((object(),), PayloadError), (("a", 1, 2), InvalidTask), (("x" * 10_001,), PayloadError)]:
        calls = [("a.png",)] * 6_000 + [bad]
        with pytest.raises(error):
            live_app.enqueue_many(task, calls)
        with pytest.raises(error):
            live_app.start_many(task, calls)
    with pytest.raises(InvalidTask, match="A run name"):
        live_app.start_many(task, ["a.png"], name="no good")
    assert rows(database_url) == (0, 0)


def test_a_rolled_back_transaction_writes_nothing(live_app: Orchestrator, database_url: str) -> None:
    task = live_app.task(name="resize")(resize)
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.connect() as connection:
        with connection.begin() as transaction:
            task.enqueue_in(connection, "a.png")
            transaction.rollback()
        with pytest.raises(PayloadError), connection.begin():
            task.enqueue_in(connection, "a.png")
            task.enqueue_in(connection, object())  # type: ignore[arg-type]
    engine.dispose()
    assert rows(database_url) == (0, 0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max": -1}, "max"),
        ({"max": "3"}, "max"),
        ({"base": -1}, "base"),
        ({"base": math.nan}, "base"),
        ({"cap": math.inf}, "cap"),
        ({"jitter": 1.5}, "jitter"),
        ({"backoff": "quadratic"}, "backoff"),
        ({"backoff": [1, -1]}, "backoff"),
        ({"backoff": [1, "2"]}, "backoff"),
    ],
)
def test_an_invalid_retry_policy_is_rejected_at_its_creation(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidTask, match=rf"^Retry: expected .* in {field}=, found "):
        Retry(**given)


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: [inner],
        lambda inner: {"key": inner},
        lambda inner: {7: inner},
        lambda inner: [*([1.5] * 300), inner],
        lambda inner: {**{str(number): "ä" * 300 for number in range(3)}, "last": inner},
    ],
)
def test_the_nesting_limit_holds_whatever_surrounds_the_value(around: Callable[[Any], Any]) -> None:
    value: Any = 0
    for _ in range(MAX_LEVELS - 1):
        value = around(value)
    assert decode_value(encode_value(value, "It", 10_000_000)) == value
    with pytest.raises(PayloadError, match="nested more than 200 levels deep"):
        encode_value(around(value), "It", 10_000_000)


@pytest.mark.parametrize(
    "value", [[{"id": n, "price": n * 1.5} for n in range(1_000)], ["ä" * 5_000] * 3, b"\x90" * 999]
)
def test_wide_values_are_not_decoded_to_check_their_depth(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "is_too_deep", pytest.fail)
    encode_value(value, "It", 10_000_000)


def test_invalid_handles_are_named_in_the_error() -> None:
    with pytest.raises(TypeError, match="as_completed and gather: expected handles, .* found 1"):
        not_handles: Any = [1]
        list(as_completed(not_handles))
    with pytest.raises(TypeError, match="expected handles, .* found 'x'"):
        neither: Any = ["x"]
        gather(neither)


def test_enqueue_in_rejects_connections_to_other_databases(live_app: Orchestrator) -> None:
    task = live_app.task(name="job")(lambda: None)
    engine = create_engine("sqlite://")
    with engine.connect() as connection, Session(engine) as session:
        for place in (connection, session):
            with pytest.raises(InvalidTask, match="enqueue_in: expected a connection to the Postgres .* to sqlite"):
                task.enqueue_in(place)
    engine.dispose()


def _places_and_names(a: int, b: int = 2) -> None: ...
def _of_every_kind(a: int, /, b: int, c: int = 3, *, d: int, e: int = 5) -> None: ...
def _of_any_number(a: int, *rest: int, d: int, **more: int) -> None: ...


@pytest.mark.parametrize("function", [_places_and_names, _of_every_kind, _of_any_number])
def test_a_call_is_rejected_exactly_when_python_would_reject_it(function: Callable[..., None]) -> None:
    signature, python = Signature("job", function), inspect.signature(function)
    for places, count in itertools.product(range(5), range(6)):
        for names in itertools.combinations("abcde", count):
            arguments, keywords = [1] * places, dict.fromkeys(names, 1)
            try:
                python.bind(*arguments, **keywords)
            except TypeError:
                with pytest.raises(InvalidTask):
                    signature.check(arguments, keywords)
            else:
                signature.check(arguments, keywords)
                signature.check_types(arguments, keywords, encode_call("job", arguments, keywords, 1_000))
                for wrong in names:
                    said = {**keywords, wrong: "1"}
                    with pytest.raises(InvalidTask, match="expected int"):
                        signature.check_types(arguments, said, encode_call("job", arguments, said, 1_000))
