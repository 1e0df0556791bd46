"""A small, safe language for inputs and conditions: `${discover.files[0].name}`, `${len(params.days) > 3}`.

There is no eval, no attribute access and no loop. Values cannot grow beyond `MAX_LENGTH`, and the work of an evaluation
is limited (`scope.py`). Operators by increasing precedence:

    or    and    not    == != < <= > >= in, not in    + -    * / %    - (sign)    .field [index] function(...)

Names may contain `-`, so a minus between two names needs spaces around it. A dot always selects a field: a step named
`load.orders` is written in backquotes, as in ${`load.orders`.rows}. Comparisons are not chained.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from orchestrator.domain.dag.grammar import DEEPEST, WRAPPED, Path, read
from orchestrator.domain.dag.operators import MAX_LENGTH, Evaluate, Fault, Names, describe, shortened
from orchestrator.domain.dag.scope import EvaluationBudget, Scope, TooMuch, scope_of
from orchestrator.errors import ExpressionError


class Expression:
    """A parsed expression."""

    __slots__ = ("_evaluate", "_is_name", "paths", "roots", "text")

    def __init__(self, text: str, evaluate: Evaluate, paths: Iterable[Path]) -> None:
        self.text = text
        self.paths = frozenset(paths)
        """The first name of each path, with the field selected from it, if that is a plain name."""
        self.roots = frozenset(root for root, _ in self.paths)
        self._evaluate = evaluate
        self._is_name = text.strip().strip("`") in self.roots

    def __repr__(self) -> str:
        return f"<Expression {self.text}>"

    def evaluate(self, names: Names) -> Any:
        """Return the value, or raise ExpressionError."""
        scope = scope_of(names)
        if (scope.sealed or scope.stored) and not self._is_name:
            scope.check_readable(self.roots, f"Expression {shortened(self.text)}")
        try:
            return self._evaluate(scope)
        except Fault as fault:
            raise ExpressionError(f"Expression {shortened(self.text)}: {fault}") from None
        except TooMuch as reason:
            raise ExpressionError(f"Expression {shortened(self.text)}: {reason}.") from None
        except RecursionError:
            raise ExpressionError(f"Expression {shortened(self.text)}: its values are nested too deeply.") from None


class Template:
    """Plain data in which strings may contain `${...}`. Rendered values are shared: do not modify them."""

    __slots__ = ("_render", "expressions", "is_constant", "paths", "roots")

    def __init__(self, render: Evaluate, paths: Iterable[Path], is_constant: bool, expressions: int = 0) -> None:
        self.paths = frozenset(paths)
        self.roots = frozenset(root for root, _ in self.paths)
        self.is_constant = is_constant
        """The template contains no expressions."""
        self.expressions = expressions
        """The number of expressions in the template."""
        self._render = render

    def render(self, names: Names) -> Any:
        """Return the value with every expression evaluated."""
        scope = scope_of(names)
        value = self.fill(scope)
        if self.expressions > _MAX_UNCHECKED:
            _check_size(value, scope.budget)
        return value

    def fill(self, names: Scope) -> Any:
        """Return the rendered value for use within a larger one, whose size is checked as a whole."""
        return self._render(names)


_MAX_UNCHECKED = 10
"""Expressions in a template whose size needs no check: each value is limited itself, so few cannot grow large."""


def _check_size(value: Any, budget: EvaluationBudget) -> None:
    try:
        size = budget.weight(value)
    except TooMuch as reason:
        raise ExpressionError(f"The values that its expressions name: {reason}.") from None
    except RecursionError:
        raise ExpressionError("The values that its expressions name are nested too deeply.") from None
    if budget.most_data is not None and size > budget.most_data:
        raise ExpressionError(
            f"The values that its expressions name have about {size:,} bytes together, and at most "
            f"{budget.most_data:,} are allowed. Perhaps one value is named too often."
        )


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """Parse an expression, with or without `${}` around it."""
    text = unwrap(text)
    return Expression(text, *read(text))


def unwrap(text: str) -> str:
    """Return an expression without surrounding `${}`."""
    text = text.strip()
    match = WRAPPED.fullmatch(text)
    return match["inside"].strip() if match else text


def parse_template(value: Any) -> Template:
    """Parse plain data. A string that is a single `${...}` becomes its value. In others, values become text."""
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
        return _collected(items, plain, lambda names: [item.fill(names) for item in items])
    if isinstance(value, Mapping):
        fields = {key: _template(item, depth + 1) for key, item in value.items()}
        plain = {key: item.render({}) for key, item in fields.items() if item.is_constant}
        return _collected(fields.values(), plain, lambda names: {key: item.fill(names) for key, item in fields.items()})
    return _constant(value)


def _constant(value: Any) -> Template:
    return Template(lambda _: value, (), True)


def _collected(parts: Iterable[Template], plain: Any, render: Evaluate) -> Template:
    parts = list(parts)
    if all(part.is_constant for part in parts):
        return _constant(plain)
    expressions = sum(part.expressions for part in parts)
    return Template(render, (path for part in parts for path in part.paths), False, expressions)


def _text_template(text: str) -> Template:
    pieces: list[str | Expression] = []
    offset = 0
    while (opening := _OPENING.search(text, offset)) is not None:
        pieces.append(text[offset : opening.start()])
        if opening[0] == "$${":
            pieces.append("${")
            offset = opening.end()
            continue
        match = WRAPPED.match(text, opening.start())
        if match is None:
            raise ExpressionError(
                f"Expression in {shortened(text)}: `${{` at character {opening.start() + 1} has no `}}`, or a string "
                f"in it has no end. Write $${{ for a literal ${{."
            )
        pieces.append(parse(match["inside"]))
        offset = match.end()
    pieces.append(text[offset:])
    pieces = [piece for piece in pieces if piece != ""]
    expressions = [piece for piece in pieces if isinstance(piece, Expression)]
    if not expressions:
        return _constant("".join(str(piece) for piece in pieces))
    paths = (path for expression in expressions for path in expression.paths)
    if len(pieces) == 1:
        return Template(expressions[0].evaluate, paths, False, 1)

    def fill_in(names: Scope) -> str:
        length = 0
        filled: list[str] = []
        for piece in pieces:
            filled.append(piece if isinstance(piece, str) else _as_text(piece, names))
            length += len(filled[-1])
            if length > MAX_LENGTH:
                raise ExpressionError(
                    f"Expression in {shortened(text)}: the text is longer than {MAX_LENGTH:,} characters."
                )
        return "".join(filled)

    return Template(fill_in, paths, False, len(expressions))


def _as_text(expression: Expression, names: Scope) -> str:
    """Return a value as text within a string: strings unchanged, everything else as JSON, with NaN and Infinity."""
    value = expression.evaluate(names)
    try:
        names.budget.copy(names.budget.weight(value))
        if isinstance(value, str):
            return value
        plain = msgspec.to_builtins(value)
        if isinstance(plain, str):
            return plain
        text = msgspec.json.encode(plain)
        return (msgspec.json.encode(_with_non_finite(plain)) if b"null" in text else text).decode()
    except TooMuch as reason:
        raise ExpressionError(f"Expression {shortened(expression.text)}: {reason}.") from None
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ExpressionError(
            f"Expression {shortened(expression.text)}: {describe(value)} cannot be inserted into a string: {error}."
        ) from None


def _with_non_finite(plain: Any) -> Any:
    """Return data with NaN and infinities encoded as in Python and JavaScript."""
    if isinstance(plain, float) and not math.isfinite(plain):
        return msgspec.Raw(b"NaN" if math.isnan(plain) else b"Infinity" if plain > 0 else b"-Infinity")
    if isinstance(plain, dict):
        return {key: _with_non_finite(value) for key, value in plain.items()}
    return [_with_non_finite(item) for item in plain] if isinstance(plain, (list, tuple)) else plain
