"""The colors of a program's output become HTML, and nothing else does."""

from __future__ import annotations

import pytest

from orchestrator.api.dashboard.rendering import rules, styled
from orchestrator.terminal_safe import without_styles


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain <b>", "plain &lt;b&gt;"),
        ("\x1b[31mred\x1b[0m not", '<span class="fg n1">red</span> not'),
        (
            "\x1b[1;94mblue\x1b[22m too",
            '<span class="fg n12"><strong>blue</strong></span><span class="fg n12"> too</span>',
        ),
        ("\x1b[38;5;208;48;5;17mx", '<span class="bg n17"><span class="fg n208">x</span></span>'),
        ("\x1b[38;2;255;0;0mx\x1b[39my", '<span class="fg n196">x</span>y'),
        ("\x1b[38;5;999mx", '<span class="fg n255">x</span>'),
        ("\x1b[98;38mx", "x"),
        ("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\ \x1b[2K\x1b[3;4Hgone", "link gone"),
        ("\x1b[31m<script>\x1b[0m", '<span class="fg n1">&lt;script&gt;</span>'),
        ("\x1b[4mfar\x1b[24m off", "<u>far</u> off"),
        ('\x1b]0;"><script>\x07title \x1b x', "title � x"),
    ],
)
def test_colors_become_classes_and_all_else_is_escaped_text(text: str, shown: str) -> None:
    assert styled(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("An Error and an error", "An <mark>Error</mark> and an <mark>error</mark>"),
        (
            "no\x1b[31m err\x1b[0mor",
            'no<span class="fg n1"> </span><mark><span class="fg n1">err</span></mark><mark>or</mark>',
        ),
        ("errorerror", "<mark>errorerror</mark>"),
        ("\x1b[4m.\x1b[0mplain", "<u>.</u>plain"),
    ],
)
def test_search_matches_are_marked_across_colors(text: str, shown: str) -> None:
    assert styled(text, "error") == shown


def test_each_of_256_colors_has_a_css_rule() -> None:
    assert [f".n{number}{{--n:#" in rules() for number in range(256)] == [True] * 256


def test_styles_are_removed_for_a_terminal_without_colors() -> None:
    assert without_styles("\x1b[1;31mred\x1b[0m \x1b]8;;x\x07link \x1b[2J\x07") == "red link �"
