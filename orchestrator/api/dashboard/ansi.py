"""Colours of a program's output, as HTML: 16 and 256 of them, and bold. Links and movements are left out."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup, escape

from orchestrator.terminal_safe import SEQUENCES, terminal_safe

_FIRST = (
    *("000000", "cd3131", "0f9d58", "b58900", "2472c8", "bc3fbc", "1197b5", "c0c0c0"),
    *("767676", "f14c4c", "23d18b", "e5c04b", "3b8eea", "d670d6", "29b8db", "ffffff"),
)
_LEVELS = (0, 95, 135, 175, 215, 255)


def rules() -> str:
    """Return the style sheet of the colours: each is a variable, which the page mixes with its own text colour."""
    cube = [f"{red:02x}{green:02x}{blue:02x}" for red in _LEVELS for green in _LEVELS for blue in _LEVELS]
    greys = [f"{8 + 10 * step:02x}" * 3 for step in range(24)]
    return "".join(f".n{number}{{--n:#{code}}}" for number, code in enumerate((*_FIRST, *cube, *greys)))


def styled(text: str) -> Markup:
    """Return a line with its colours; everything is escaped."""
    if "\x1b" not in text:
        return escape(terminal_safe(text))
    parts, style, at = [], _Style(), 0
    for found in SEQUENCES.finditer(text):
        parts.append(style.around(text[at : found.start()]))
        at = found.end()
        if found[1] is not None:
            style.change(found[1])
    return Markup("").join([*parts, style.around(text[at:])])


class _Style:
    """The colours in which the next characters are shown."""

    def __init__(self) -> None:
        self.is_bold = False
        self.text: int | None = None
        self.ground: int | None = None

    def around(self, text: str) -> Markup:
        found = escape(terminal_safe(text))
        if not text:
            return found
        if self.is_bold:
            found = Markup("<strong>{}</strong>").format(found)
        if self.text is not None:
            found = Markup('<span class="fg n{}">{}</span>').format(self.text, found)
        if self.ground is not None:
            found = Markup('<span class="bg n{}">{}</span>').format(self.ground, found)
        return found

    def change(self, codes: str) -> None:
        """Apply the numbers of one sequence; those that are not known change nothing."""
        numbers = iter([int(code or 0) for code in codes.replace(":", ";").split(";")])
        for code in numbers:
            if code == 0:
                self.is_bold, self.text, self.ground = False, None, None
            elif code in (1, 22):
                self.is_bold = code == 1
            elif code in (39, 49):
                self._set(code - 9, None)
            elif code in (38, 48):
                self._set(code - 8, _extended(numbers))
            elif code % 10 < 8 and code // 10 in (3, 4):
                self._set(code, code % 10)
            elif code % 10 < 8 and code // 10 in (9, 10):
                self._set(code - 60, 8 + code % 10)

    def _set(self, code: int, colour: int | None) -> None:
        if code < 40:
            self.text = colour
        else:
            self.ground = colour


def _extended(numbers: Iterator[int]) -> int | None:
    """Return one of 256 colours; of those in red, green and blue, the nearest in the cube."""
    kind = next(numbers, 0)
    if kind == 2:
        red, green, blue = (round(5 * min(next(numbers, 0), 255) / 255) for _ in range(3))
        return 16 + 36 * red + 6 * green + blue
    return min(next(numbers, 0), 255) if kind == 5 else None
