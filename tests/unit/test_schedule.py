"""Schedules: cron, time zones, clock changes, intervals and catching up."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import Phase, example, given
from hypothesis import strategies as st

from orchestrator.domain.schedules import cron as cron_module
from orchestrator.domain.schedules.cron import cron_problem
from orchestrator.domain.schedules.schedule import PUNCTUAL, Schedule, decide, delay_of, fire_key, fires, next_fire
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag.schedule_fields import checked_schedule
from tests.fuzzing import examples
from tests.wall_clock import DAYS, MONTHS, brute_fires

BERLIN = "Europe/Berlin"
ZONES = [
    "UTC",
    BERLIN,
    "America/New_York",
    "America/St_Johns",  # offset of a half hour
    "Australia/Lord_Howe",  # changed by half an hour
    "Pacific/Apia",  # without December 30, 2011
    "Pacific/Chatham",  # offset of 45 minutes
    "Africa/Casablanca",  # changed for Ramadan
    "Asia/Kathmandu",
    "America/Sao_Paulo",  # changed at midnight, until 2019
    "Antarctica/Troll",  # changed by two hours
    "Atlantic/Azores",
    "Asia/Gaza",
]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def cron(expression: str, zone: str = "UTC", **options: object) -> Schedule:
    return Schedule(cron=expression, timezone=zone, **options)  # type: ignore[arg-type]


def local_fires(schedule: Schedule, start: str, end: str) -> list[str]:
    """Return fires in local time."""
    found = fires(schedule, utc(start), utc(end))
    return [fire.astimezone(schedule.zone).strftime("%d %H:%M%z") for fire in found]


# -- against a second implementation


def numbers(low: int, high: int, names: tuple[str, ...] | None = None) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    word = number.map(lambda value: names[value]) if names else number.map(str)
    span = st.tuples(number, number).map(lambda two: f"{min(two)}-{max(two)}")
    part = st.one_of(
        word, number.map(str), span, st.tuples(span, st.integers(1, 9)).map(lambda two: f"{two[0]}/{two[1]}")
    )
    return st.lists(part, min_size=1, max_size=3).map(",".join)


def field(
    low: int, high: int, names: tuple[str, ...] | None = None, *special: st.SearchStrategy[str]
) -> st.SearchStrategy[str]:
    steps = st.integers(2, max(2, (high - low) // 2)).map(lambda step: f"*/{step}")
    return st.one_of(st.just("*"), steps, numbers(low, high, names), *special)


hours = st.one_of(st.integers(0, 4).map(str), field(0, 23))
days_of_month = st.one_of(st.just("*"), numbers(1, 31), st.just("L"))
nth = st.tuples(st.sampled_from(DAYS), st.integers(1, 5)).map(lambda two: f"{two[0]}#{two[1]}")
last = st.integers(0, 6).map(lambda day: f"L{day}")
days_of_week = st.one_of(st.just("*"), st.just("*"), numbers(0, 6, DAYS), nth, last)
months = st.one_of(st.just("*"), st.just("*"), numbers(1, 12, MONTHS))
expressions = st.tuples(field(0, 59), hours, days_of_month, months, days_of_week).map(" ".join)


def clock_changes(zone: str) -> list[datetime]:
    found = [turn for year in range(2008, 2030) for turn in cron_module._clock_changes(ZoneInfo(zone), year)]
    return found or [utc("2026-03-29 01:00")]


@st.composite
def clocks(draw: st.DrawFn) -> tuple[str, datetime]:
    """Return a zone and a whole minute, mostly close to a clock change."""
    zone = draw(st.sampled_from(ZONES))
    near = st.sampled_from(clock_changes(zone)).flatmap(
        lambda turn: st.integers(-2_000, 200).map(lambda minutes: turn + timedelta(minutes=minutes))
    )
    anywhere = st.integers(0, 11_000_000).map(lambda minutes: utc("2008-01-01") + timedelta(minutes=minutes))
    return zone, draw(st.one_of(near, near, anywhere)).replace(second=0)


@examples(75, phases=[Phase.explicit, Phase.generate])  # shrinking an example takes minutes
@given(expressions, clocks())
@example("30 2 * * *", (BERLIN, utc("2026-03-28 00:00")))
@example("0-0 5-5/2 * * TUE-2", (BERLIN, utc("2026-03-30 00:00")))
@example("30 2 * * *", (BERLIN, utc("2026-10-24 12:00")))
@example("*/20 * * * *", ("Australia/Lord_Howe", utc("2026-04-04 00:00")))
@example("0 12 30 12 *", ("Pacific/Apia", utc("2011-12-29 00:00")))
@pytest.mark.slow
def test_cron_agrees_with_a_minute_by_minute_check(expression: str, clock: tuple[str, datetime]) -> None:
    zone, start = clock
    end = start + timedelta(days=2)
    if cron_problem(expression) is None:
        found = list(fires(cron(expression, zone), start, end))
        assert found == brute_fires(expression, ZoneInfo(zone), start, end)


def test_the_fires_of_a_day_need_one_calendar_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backfill counts fires: a lookup takes a twentieth of a millisecond, and a year has half a million minutes."""
    looks = 0
    next_local = cron_module.next_local

    def looking(expression: str, after: datetime) -> datetime | None:
        nonlocal looks
        looks += 1
        return next_local(expression, after)

    monkeypatch.setattr(cron_module, "next_local", looking)
    found = list(fires(cron("* * * * *", BERLIN), utc("2026-03-25"), utc("2026-04-01")))
    assert found == [utc("2026-03-25") + timedelta(minutes=minute) for minute in range(7 * 24 * 60)]
    assert looks < 8 * 4 + 3 * 60, "only a day is gone through minute by minute, up to where its clock is turned"


def test_seconds_and_bounds_hold_within_a_day() -> None:
    schedule = cron("*/20 0 9 * * MON", BERLIN, start="2026-01-05T09:00:20", end="2026-01-12T09:00:40")
    found = [fire.astimezone(schedule.zone) for fire in fires(schedule, utc("2026-01-01"), utc("2026-02-01"))]
    assert [f"{fire:%d %H:%M:%S}" for fire in found] == ["05 09:00:20", "05 09:00:40", "12 09:00:00", "12 09:00:20"]


@examples(150)
@given(expressions, clocks(), st.integers(0, 59_999_999))
@pytest.mark.slow
def test_no_fire_lies_between_a_moment_and_its_next_fire(
    expression: str, clock: tuple[str, datetime], odd: int
) -> None:
    """The same fires come wherever the count starts."""
    zone, start = clock
    schedule = cron(expression, zone)
    if cron_problem(expression) is not None:
        return
    after = start + timedelta(microseconds=odd)
    first = next_fire(schedule, after)
    if first is None:
        return
    assert first > after
    assert next_fire(schedule, first - timedelta(microseconds=1)) == first
    assert next_fire(schedule, after + (first - after) / 2) == first


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("59/5 * * * *", ["00:59", "01:59", "02:59"]),
        ("0,59/7 1 * * *", ["01:00", "01:59"]),
        ("50/5 1 * * *", ["01:50", "01:55"]),
        ("30 23/2 * * *", ["23:30"]),
        ("0 12 31/3 * *", []),
        ("0 12 1/30 1/11 *", ["12:00"]),
        ("0 12 * 12/5 *", []),
        ("0 12 * * 4/2", ["12:00"]),
        ("0 12 * * 6/2", []),
        ("0 12 * * SAT/2", []),
        ("0 12 * * 7/2", []),
        ("59/10 59 1 * * *", ["01:59"]),
    ],
)
def test_steps_from_a_value_go_to_the_end_of_the_field(expression: str, expected: list[str]) -> None:
    """The day is January 1, 2026, a Thursday."""
    found = fires(cron(expression), utc("2026-01-01"), utc("2026-01-02"))
    assert [f"{fire:%H:%M}" for fire in found][: len(expected) or 1] == expected


# -- start and end


def test_a_schedule_fires_from_its_start_until_before_its_end() -> None:
    schedule = cron("0 0 * * *", BERLIN, start="2026-03-01", end="2026-03-04")
    found = list(fires(schedule, utc("2026-01-01"), utc("2027-01-01")))
    assert [f"{fire:%d %H:%M}" for fire in found] == ["28 23:00", "01 23:00", "02 23:00"]
    assert next_fire(schedule, utc("2026-03-03")) is None
    assert schedule.description() == "0 0 * * *, from 2026-03-01, before 2026-03-04"


def test_an_interval_keeps_its_rhythm_whatever_its_start() -> None:
    schedule = Schedule(every=600.0, start="2026-03-01T10:05", end="2026-03-01T10:30+00:00")
    found = list(fires(schedule, utc("2026-01-01"), utc("2027-01-01")))
    assert [f"{fire:%H:%M}" for fire in found] == ["10:10", "10:20"]


def test_fires_outside_the_bounds_are_not_caught_up() -> None:
    schedule = cron("0 * * * *", start="2026-03-01T10:00", end="2026-03-01T13:00", catch_up="all")
    decision = decide(schedule, utc("2026-03-01 10:00"), utc("2026-03-05 00:00"), 100)
    assert [f"{fire:%H}" for fire in decision.fires] == ["10", "11", "12"]
    assert decision.next_fire is None
    only_latest = msgspec.structs.replace(schedule, catch_up="latest")
    latest = decide(only_latest, utc("2026-03-01 10:00"), utc("2026-03-05"), 9)
    assert [f"{fire:%H}" for fire in latest.fires] == ["12"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"cron": "0 3 * * *", "start": "soon"}, "schedule.start: expected a time such as"),
        (
            {"cron": "0 3 * * *", "start": "2026-02-01", "end": "2026-02-01"},
            "schedule.end: expected a moment after start",
        ),
        ({"at": "2026-02-01", "end": "2026-03-01"}, "schedule.end: expected only with cron or every"),
    ],
)
def test_invalid_bounds_are_rejected(data: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidWorkflow, match=words):
        checked_schedule(data)


# -- single clock changes


@pytest.mark.parametrize(
    ("expression", "zone", "start", "end", "expected"),
    [
        ("30 2 * * *", BERLIN, "2026-03-28", "2026-03-31", ["28 02:30+0100", "29 03:00+0200", "30 02:30+0200"]),
        ("30 2 * * *", BERLIN, "2026-10-24", "2026-10-27", ["24 02:30+0200", "25 02:30+0200", "26 02:30+0100"]),
        ("0,30 2 * * *", BERLIN, "2026-03-29", "2026-03-29 12:00", ["29 03:00+0200"]),
        ("0 2,3 * * *", BERLIN, "2026-03-29", "2026-03-29 12:00", ["29 03:00+0200"]),
        (
            "0 * * * *",
            BERLIN,
            "2026-03-29 00:00",
            "2026-03-29 03:00",
            ["29 01:00+0100", "29 03:00+0200", "29 04:00+0200"],
        ),
        ("0 * * * *", BERLIN, "2026-10-25 00:00", "2026-10-25 02:00", ["25 02:00+0200", "25 02:00+0100"]),
        (
            "0 */2 * * *",
            BERLIN,
            "2026-10-24 22:00",
            "2026-10-25 04:00",
            ["25 00:00+0200", "25 02:00+0200", "25 02:00+0100", "25 04:00+0100"],
        ),
        ("30 */2 * * *", BERLIN, "2026-03-28 23:00", "2026-03-29 03:00", ["29 00:30+0100", "29 04:30+0200"]),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03", "2018-11-05", ["03 00:00-0300", "04 01:00-0200"]),
        ("0 3 30 12 *", "Pacific/Apia", "2011-12-01", "2012-01-10", ["31 00:00+1400"]),
        ("0 0 29 2 *", "UTC", "2023-01-01", "2029-01-01", ["29 00:00+0000", "29 00:00+0000"]),
        ("0 9 * * FRI#2", "UTC", "2026-01-01", "2026-03-01", ["09 09:00+0000", "13 09:00+0000"]),
        ("0 9 * * L5", "UTC", "2026-01-01", "2026-03-01", ["30 09:00+0000", "27 09:00+0000"]),
        ("0 0 L * *", "UTC", "2026-01-01", "2026-03-01", ["31 00:00+0000", "28 00:00+0000"]),
        ("@daily", BERLIN, "2026-01-01", "2026-01-03", ["02 00:00+0100", "03 00:00+0100"]),
    ],
)
def test_fires_follow_the_wall_clock_across_clock_changes(
    expression: str, zone: str, start: str, end: str, expected: list[str]
) -> None:
    assert local_fires(cron(expression, zone), start, end) == expected


def test_six_fields_begin_with_seconds() -> None:
    found = list(fires(cron("*/20 59 23 * * *"), utc("2026-01-01 23:59:10"), utc("2026-01-02 23:59:01")))
    assert [f"{fire:%d %H:%M:%S}" for fire in found] == ["01 23:59:20", "01 23:59:40", "02 23:59:00"]


def test_an_interval_ignores_clock_changes() -> None:
    schedule = Schedule(every=5400.0, timezone=BERLIN)
    found = list(fires(schedule, utc("2026-03-28 22:00"), utc("2026-03-29 04:00")))
    assert {later - earlier for earlier, later in itertools.pairwise(found)} == {timedelta(minutes=90)}
    assert next_fire(schedule, utc("2026-03-29 01:13:07")) == next_fire(schedule, utc("2026-03-29 01:02:00"))
    assert next_fire(Schedule(every=600.0), utc("2026-01-01 00:00:00")) == utc("2026-01-01 00:10")


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("2026-07-01T09:00:00", "2026-07-01 07:00"),
        ("2026-03-29T02:30:00", "2026-03-29 01:00"),
        ("2026-10-25T02:30:00", "2026-10-25 00:30"),
        ("2026-07-01T09:00:00-04:00", "2026-07-01 13:00"),
    ],
)
def test_a_single_moment_fires_once(at: str, expected: str) -> None:
    schedule = Schedule(at=at, timezone=BERLIN)
    assert next_fire(schedule, utc("2026-01-01")) == utc(expected)
    assert next_fire(schedule, utc(expected)) is None


def test_no_fire_follows_the_maximum_date() -> None:
    assert next_fire(cron("0 0 1 1 *", BERLIN), utc("9998-06-01")) is None


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("60 * * * *", "minute '60' of"),
        ("* 24 * * *", "hour '24' of"),
        ("* * 32 * *", "day of month '32' of"),
        ("* * * 13 *", "month '13' of"),
        ("* * * * 8", "day of week '8' of"),
        ("* * * * MON#6", "day of week 'MON#6' of"),
        ("60 * * * * *", "second '60' of"),
        ("* * * FOO *", "month 'FOO' of"),
        ("5-1/0 * * * *", "minute '5-1/0' of"),
        ("0 0 13 * FRI#2", "day of week 'FRI#2' of '0 0 13 * FRI#2': # and L go with * as day of month"),
        ("* * * *", "found 4 in"),
        ("@fortnightly", "expected one of @hourly"),
        ("0 0 30 2 *", "never comes"),
        ("*/61 * * * *", "minute '*/61' of '*/61 * * * *': expected a step of at most 60"),
        ("*/61 * * * * *", "second '*/61' of"),
        ("0 0-23/25 * * *", "hour '0-23/25' of"),
        ("0 0 1/32 * *", "day of month '1/32' of"),
        ("0 0 1 */13 *", "month '*/13' of"),
        ("0 0 * * */8", "day of week '*/8' of"),
        ("0 0 * * MON,TUE/99999999999999999999", "day of week"),
    ],
)
def test_an_invalid_expression_is_rejected_with_its_field(expression: str, words: str) -> None:
    assert words in (cron_problem(expression) or "")


@pytest.mark.parametrize("expression", ["*/60 * * * *", "0 */24 * * *", "0 0 */31 * *", "0 0 1 */12 *", "0 0 * * */7"])
def test_a_step_may_be_as_long_as_its_field(expression: str) -> None:
    assert cron_problem(expression) is None


# -- run keys and jitter


def test_a_fire_has_the_same_run_key_in_every_zone() -> None:
    fire = utc("2026-03-29 01:00")
    assert fire_key("a/default", fire) == fire_key("a/default", fire.astimezone(ZoneInfo(BERLIN)))
    assert fire_key("a/default", fire) != fire_key("b/default", fire)


def test_jitter_spreads_schedules_and_is_constant_for_each() -> None:
    schedule = cron("0 * * * *", jitter=600.0)
    delays = [delay_of(schedule, f"w{number}/default") for number in range(200)]
    assert delays == [delay_of(schedule, f"w{number}/default") for number in range(200)]
    assert all(timedelta() <= delay <= timedelta(seconds=600) for delay in delays)
    assert len(set(delays)) > 100
    assert delay_of(cron("0 * * * *"), "w/default") == timedelta()


# -- catching up

HOURLY = "0 * * * *"
NOW = utc("2026-01-10 12:00:20")


@pytest.mark.parametrize(
    ("catch_up", "due", "expected"),
    [
        ("none", "2026-01-10 12:00", ["10 12"]),
        ("none", "2026-01-10 09:00", ["10 12"]),
        ("latest", "2026-01-10 09:00", ["10 12"]),
        ("all(2)", "2026-01-10 09:00", ["10 11", "10 12"]),
        ("all(1000)", "2026-01-10 09:00", ["10 09", "10 10", "10 11", "10 12"]),
        ("all", "2026-01-10 09:00", ["10 09", "10 10", "10 11", "10 12"]),
        ("all", "2026-01-10 13:00", []),
    ],
)
def test_missed_fires_are_caught_up_as_configured(catch_up: str, due: str, expected: list[str]) -> None:
    decision = decide(cron(HOURLY, catch_up=catch_up), utc(due), NOW, 100)
    assert [f"{fire:%d %H}" for fire in decision.fires] == expected
    assert decision.next_fire == utc("2026-01-10 13:00")


def test_without_catch_up_missed_fires_are_dropped_but_late_fires_run() -> None:
    schedule = cron("0 3 * * *", catch_up="none")
    due = utc("2026-01-10 03:00")
    assert decide(schedule, due, due + PUNCTUAL, 9).fires == [due]
    assert decide(schedule, due, due + PUNCTUAL + timedelta(seconds=1), 9) == ([], utc("2026-01-11 03:00"))
    assert decide(schedule, due - timedelta(days=9), due + timedelta(hours=1), 9) == ([], utc("2026-01-11 03:00"))


@examples(40)
@given(expressions, clocks(), st.integers(0, 5_000), st.sampled_from(["none", "latest", "all(3)", "all(20)", "all"]))
@pytest.mark.slow
def test_catching_up_agrees_with_the_list_of_missed_fires(
    expression: str, clock: tuple[str, datetime], minutes: int, catch_up: str
) -> None:
    """Compares with the list of all fires; in slices, the same fires come."""
    zone, start = clock
    if cron_problem(expression) is not None:
        return
    schedule = cron(expression, zone, catch_up=catch_up)
    due = next_fire(schedule, start)
    if due is None:
        return
    now = due + timedelta(minutes=minutes)
    missed = list(fires(schedule, due, now + timedelta(microseconds=1)))
    wanted = {"none": [fire for fire in missed[-1:] if now - fire <= PUNCTUAL], "latest": missed[-1:]}
    wanted |= {"all(3)": missed[-3:], "all(20)": missed[-20:], "all": missed}
    taken: list[datetime] = []
    following: datetime | None = due
    while following is not None and following <= now:
        decision = decide(schedule, following, now, 7)
        assert len(decision.fires) <= 7
        taken += decision.fires
        following = decision.next_fire
    assert taken == wanted[catch_up]
    assert following == next_fire(schedule, now)


def test_a_year_of_missed_seconds_is_skipped_quickly() -> None:
    start = utc("2025-01-01")
    decision = decide(cron("* * * * * *"), start, start + timedelta(days=365), 9)
    assert decision.fires == [start + timedelta(days=365)]
