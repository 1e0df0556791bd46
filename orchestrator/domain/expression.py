"""A small, safe language for inputs and conditions: `${discover.files[0].name}`, `${len(params.days) > 3}`.

There is no eval, no attribute access, no loop and no way to make a value larger than `LARGEST`. From the loosest to
the tightest:

    or    and    not    == != < <= > >= in, not in    + -    * / %    - (sign)    .field [index] function(...)

A name may contain `-`, as names of steps do; so a minus between two names wants spaces around it. A dot always asks for
a field: the step `load.orders` is written in backquotes, as in ${`load.orders`.rows}. Comparisons are not chained.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from orchestrator.domain.grammar import DEEPEST, WRAPPED, Path, read
from orchestrator.domain.operators import LARGEST, Evaluate, Fault, Names, describe, shortened
from orchestrator.errors import ExpressionError


class Expression:
    """An expression that has been read and can be evaluated any number of times."""

    __slots__ = ("_evaluate", "paths", "roots", "text")

    def __init__(self, text: str, evaluate: Evaluate, paths: Iterable[Path]) -> None:
        self.text = text
        self.paths = frozenset(paths)
        """The first name of each path in it and, where it is plain, the field asked of that."""
        self.roots = frozenset(root for root, _ in self.paths)
        self._evaluate = evaluate

    def __repr__(self) -> str:
        return f"<Expression {self.text}>"

    def evaluate(self, names: Names) -> Any:
        """Return the value, or say what does not fit."""
        try:
            return self._evaluate(names)
        except Fault as fault:
            raise ExpressionError(f"Expression {shortened(self.text)}: {fault}") from None
        except RecursionError:
            raise ExpressionError(f"Expression {shortened(self.text)}: its values are nested too deeply.") from None


class Template:
    """A plain value in which strings may hold `${...}`. What it renders is shared: do not change it."""

    __slots__ = ("_render", "is_constant", "paths", "roots")

    def __init__(self, render: Evaluate, paths: Iterable[Path], is_constant: bool) -> None:
        self.paths = frozenset(paths)
        self.roots = frozenset(root for root, _ in self.paths)
        self.is_constant = is_constant
        """It renders the same value whatever the names."""
        self._render = render

    def render(self, names: Names) -> Any:
        """Return the value with every expression evaluated."""
        return self._render(names)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """Read an expression, with or without `${}` around it."""
    text = unwrap(text)
    return Expression(text, *read(text))


def unwrap(text: str) -> str:
    """Return an expression without the `${}` that may stand around it."""
    text = text.strip()
    whole = WRAPPED.fullmatch(text)
    return whole["inside"].strip() if whole else text


def parse_template(value: Any) -> Template:
    """Read a plain value: a string that is one `${...}` gives its value, other strings have theirs filled in."""
    return _template(value, 0)


# -- templates


_OPENING = re.compile(r"\$?\$\{")


def _template(value: Any, depth: int) -> Template:
    if depth > DEEPEST:
        raise ExpressionError(f"A value is nested more than {DEEPEST} levels deep.")
    if isinstance(value, str):
        return _text_template(value)
    if isinstance(value, (list, tuple)):
        items = [_template(item, depth + 1) for item in value]
        plain: Any = [item.render({}) for item in items if item.is_constant]
        return _collected(items, plain, lambda names: [item.render(names) for item in items])
    if isinstance(value, Mapping):
        fields = {key: _template(item, depth + 1) for key, item in value.items()}
        plain = {key: item.render({}) for key, item in fields.items() if item.is_constant}
        return _collected(
            fields.values(), plain, lambda names: {key: item.render(names) for key, item in fields.items()}
        )
    return _constant(value)


def _constant(value: Any) -> Template:
    return Template(lambda _: value, (), True)


def _collected(parts: Iterable[Template], plain: Any, render: Evaluate) -> Template:
    parts = list(parts)
    if all(part.is_constant for part in parts):
        return _constant(plain)
    return Template(render, (path for part in parts for path in part.paths), False)


def _text_template(text: str) -> Template:
    pieces: list[str | Expression] = []
    place = 0
    while (opening := _OPENING.search(text, place)) is not None:
        pieces.append(text[place : opening.start()])
        if opening[0] == "$${":
            pieces.append("${")
            place = opening.end()
            continue
        whole = WRAPPED.match(text, opening.start())
        if whole is None:
            raise ExpressionError(
                f"Expression in {shortened(text)}: `${{` at character {opening.start() + 1} has no `}}`, or a string "
                f"in it has no end. Write $${{ for one that is plain text."
            )
        pieces.append(parse(whole["inside"]))
        place = whole.end()
    pieces.append(text[place:])
    pieces = [piece for piece in pieces if piece != ""]
    expressions = [piece for piece in pieces if isinstance(piece, Expression)]
    if not expressions:
        return _constant("".join(str(piece) for piece in pieces))
    paths = (path for expression in expressions for path in expression.paths)
    if len(pieces) == 1:
        return Template(expressions[0].evaluate, paths, False)

    def fill_in(names: Names) -> str:
        filled = "".join(piece if isinstance(piece, str) else _as_text(piece, names) for piece in pieces)
        if len(filled) > LARGEST:
            raise ExpressionError(f"Expression in {shortened(text)}: the text is longer than {LARGEST:,} characters.")
        return filled

    return Template(fill_in, paths, False)


def _as_text(expression: Expression, names: Names) -> str:
    """Return a value as it stands in a text: a string as it is, all else as JSON."""
    value = expression.evaluate(names)
    if isinstance(value, str):
        return value
    try:
        plain = msgspec.to_builtins(value)
        return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ExpressionError(
            f"Expression {shortened(expression.text)}: {describe(value)} cannot stand in a text: {error}."
        ) from None
