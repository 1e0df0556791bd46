"""The screen of `orchestrator top`: its content at any size, and its keys."""

from __future__ import annotations

import os
import pty
import sys
import termios
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.top import live
from orchestrator.cli.top.frame import Size, draw, problems
from orchestrator.cli.top.lists import bar, sparkline
from orchestrator.cli.top.live import Keyboard, keys_in
from orchestrator.cli.top.sampling import QueueNow, Snapshot
from orchestrator.cli.top.view import LOWER, SORTS, Action, Panel, View, press
from orchestrator.store.insights import Leader, RunView
from orchestrator.store.insights.activity import FailureGroup, TaskInFlight, WorkerNow
from orchestrator.store.load import SystemLoad

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ID = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e{:02}"
LOAD = SystemLoad(
    term=3,
    lease_remaining=2.0,
    leader_idle=0.1,
    inbox=0,
    stuck_runs=0,
    late_schedules=0,
    lateness=0.0,
    live_workers=2,
    slots=20,
    running=5,
    open_tasks=100,
    dead_rows=0,
    transaction_age=0.0,
    connections=1,
    max_connections=100,
    size=1,
)


def queue(name: str, ready: int = 0, **more: object) -> QueueNow:
    fields = {"delayed": 0, "in_flight": 0, "oldest": None, "slots": 20, "paused": False, "minute": (0,) * 60}
    return QueueNow(queue=name, ready=ready, **fields | more)  # type: ignore[arg-type]


def run(number: int, **more: object) -> RunView:
    fields = dict.fromkeys(RunView.__dataclass_fields__) | {
        "name": "nightly",
        "status": "running",
        "total": 8,
        "open": 2,
    }
    fields |= {"id": UUID(ID.format(number)), "created_at": NOW - timedelta(minutes=1), "failed": 1, "tags": ()}
    return RunView(**fields | more)  # type: ignore[arg-type]


FOUND = Snapshot(
    at=NOW,
    leader=Leader(address="host:1", term=3, lease_remaining=2.0, idle=0.1),
    load=LOAD,
    queues=[
        queue("mail", 12, rate=40.0, minute=tuple(range(60))),
        queue("images", 40_000, oldest=400.0, rate=2.0, failing=1.0),
        queue("alone", 3, oldest=5.0, slots=0),
    ],
    running=[
        TaskInFlight(
            id=ID.format(n),
            name=f"shop.task{n}",
            queue="mail",
            status="running",
            worker="w1",
            attempt=1,
            run_id=None,
            seconds=100.0 - n,
        )
        for n in range(30)
    ],
    workers=[WorkerNow(id="w1", queues=("mail",), slots=10, running=5, state="live")],
    failures=[
        FailureGroup(
            name="shop.pay", kind="x.Refused", message="no\x1b[2J money", tasks=7, last=NOW, latest=ID.format(7)
        )
    ],
    runs=[run(1), run(2, name="hourly", stuck={"kind": "x"})],
    minute=tuple(range(60)),
)


def screen(view: View | None = None, width: int = 80, height: int = 24, found: Snapshot | None = FOUND) -> str:
    return "\n".join(line.plain for line in draw(found, view or View(), Size(width, height)))


def pressed(view: View, *keys: str) -> list[Action]:
    return [action for key in keys if (action := press(view, key, FOUND)) is not None]


@given(st.integers(1, 250), st.integers(1, 80), st.sampled_from(LOWER), st.sampled_from([FOUND, None]), st.booleans())
def test_the_screen_is_filled_exactly_at_any_size(
    width: int, height: int, panel: Panel, found: Snapshot | None, is_open: bool
) -> None:
    view = View(panel=panel)
    if is_open:
        pressed(view, "?")
    lines = draw(found, view, Size(width, height), "it is away", 3.0)
    assert len(lines) == height or (len(lines) == 1 and (width < 40 or height < 8))
    assert all(line.cell_len <= width for line in lines)
    assert not any(ord(character) < 32 or character == "\x1b" for line in lines for character in line.plain)


def test_an_80_by_24_screen_shows_all_important_values() -> None:
    text = screen()
    for words in ("42/s end", "1.0/s fail", "leader host:1 term 3", "workers 2", "5/20", "images", "40,000+", "6m 40s"):
        assert words in text, words
    assert "No worker serves alone" in text
    assert "shop.task0" in text
    assert "? " in text.splitlines()[-1]


def test_each_panel_is_shown_by_its_key() -> None:
    view = View()
    shown = {
        "2": "shop.task0, shop.task1",
        "3": "Refused: no\N{REPLACEMENT CHARACTER}[2J money",
        "4": "6/8",
        "1": "1m 40s",
    }
    for key, words in shown.items():
        pressed(view, key)
        assert words in screen(view, 120), key
    assert "stuck" in screen(View(panel=Panel.RUNS))
    assert "■■■■■■■■■···" in screen(View(panel=Panel.RUNS)), "six tasks of eight"
    far = replace(FOUND, done={ID.format(0): 0.5})
    (row,) = (line for line in screen(found=far).splitlines() if "shop.task0 " in line)
    assert "■■■■····" in row, "as far as the task says"
    assert "■■■■····" not in screen()
    tall = screen(height=70)
    assert all(panel.value in tall for panel in LOWER)


def test_queues_are_sorted_and_filtered() -> None:
    view = View()
    orders = {}
    for name in SORTS:
        assert view.sort == name
        text = screen(view)
        orders[name] = sorted(("mail", "images", "alone"), key=lambda queue: text.index(f"\n {queue} "))
        pressed(view, "s")
    assert orders == {
        "ready": ["images", "mail", "alone"],
        "age": ["images", "alone", "mail"],
        "rate": ["mail", "images", "alone"],
        "failing": ["images", "mail", "alone"],
        "name": ["alone", "images", "mail"],
    }
    pressed(view, "/", "M", "a", "x", "backspace", "enter")
    assert view.matching == "Ma"
    assert "\n mail " in screen(view)
    assert "\n alone " not in screen(view)
    assert pressed(view, "escape") == []
    assert view.matching == ""
    assert pressed(view, "q") == [Action("quit")]


def test_no_action_runs_without_confirmation() -> None:
    view = View()
    assert pressed(view, "p") == []
    assert "Pause queue images?" in screen(view).splitlines()[-1]
    assert pressed(view, "n") == []
    assert "nothing changed" in screen(view)
    assert pressed(view, "down", "p", "y") == [Action("pause", "mail")]
    assert pressed(view, "tab", "down", "down", "c") == []
    assert f"Cancel task shop.task2 {ID.format(2)}?" in screen(view, 120)
    assert pressed(view, "y") == [Action("cancel", ID.format(2))]
    assert pressed(view, "4", "c", "y") == [Action("cancel run", ID.format(1))]
    assert pressed(view, "3", "c") == []
    assert view.question is None


def test_the_selection_follows_its_row_when_the_list_moves() -> None:
    view = View(focus=Panel.RUNNING)
    pressed(view, *["down"] * 12)
    assert view.selected[Panel.RUNNING] == ID.format(12)
    assert "shop.task12" in screen(view)
    fewer = replace(FOUND, running=FOUND.running[10:])
    assert press(view, "enter", fewer) == Action("open", ID.format(12))
    assert press(view, "enter", replace(FOUND, running=FOUND.running[20:])) == Action("open", ID.format(20))
    assert press(view, "enter", replace(FOUND, running=[])) is None


def test_problems_are_shown() -> None:
    assert [*problems(replace(FOUND, queues=[]))] == []
    bad = replace(
        FOUND,
        leader=None,
        redis="away",
        quarantined=2,
        load=replace(LOAD, stuck_runs=1, late_schedules=3, lateness=90.0),
        workers=[replace(FOUND.workers[0], state="still")],
    )
    said = "\n".join(problems(bad))
    for words in (
        "No scheduler leads",
        "Redis cannot be used: away",
        "1 runs",
        "2 messages",
        "3 schedules",
        "w1 is unresponsive",
    ):
        assert words in said, words


def test_sparklines_and_bars_are_drawn() -> None:
    assert sparkline([0, 1, 2, 4], 4) == " ▂▄▇"
    assert len(sparkline(list(range(60)), 20)) == 20
    assert sparkline([0, 0], 2) == "  "
    assert bar(0.5, 4).plain == "■■··"
    assert bar(7, 4).plain == "■■■■"


def test_keys_are_recognized_from_terminal_sequences() -> None:
    assert list(keys_in("q\x1b[A\x1bOB\x1b[5~\r\t\x7f /é\x1b[99~\x1b[M")) == [
        *("q", "up", "down", "pageup", "enter", "tab", "backspace", "space", "/", "é")
    ]
    assert list(keys_in("\x1b")) == ["escape"]


def test_the_terminal_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with os.fdopen(theirs, "r+b", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        with pytest.raises(ZeroDivisionError), Keyboard() as keys:
            assert termios.tcgetattr(theirs)[3] & termios.ICANON == 0
            keys.show(["hello"])
            raise ZeroDivisionError
        assert termios.tcgetattr(theirs) == before
        written = ""
        while not written.endswith(live._CLOSE):  # the kernel may deliver the output in parts
            written += os.read(ours, 10_000).decode()
    os.close(ours)
    assert written.startswith(live._OPEN)
