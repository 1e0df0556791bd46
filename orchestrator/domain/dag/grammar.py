"""The parser of expressions: precedence climbing, with recursion limited to `DEEPEST`.

Consecutive operators of one level form a flat chain, not a deep tree.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NoReturn

from orchestrator.domain.dag.operators import (
    FUNCTIONS,
    KEYWORDS,
    LITERALS,
    OPERATORS,
    Evaluate,
    Level,
    Links,
    Operation,
    chain,
    fits,
    follow,
    look_up,
    negate,
    not_in,
    shortened,
)
from orchestrator.errors import ExpressionError, did_you_mean

MAX_LENGTH = 10_000
"""Characters of an expression, at most."""
DEEPEST = 100
"""Nesting levels of an expression, at most."""

Path = tuple[str, str | None]
"""The first name of a path, and the plain field after it, if any."""

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_QUOTED = r"`[^`]*+`"
_STRING = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
WRAPPED = re.compile(rf"\$\{{(?P<inside>(?:[^'\"`}}]|{_STRING}|{_QUOTED})*+)\}}", re.DOTALL)
"""A `${...}`."""
_TOKEN = re.compile(
    rf"""[ \t\r\n]*+(?:
        (?P<number>[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)
      | (?P<string>{_STRING})
      | (?P<name>{_NAME})
      | (?P<quoted>{_QUOTED})
      | (?P<sign>==|!=|<=|>=|[<>+\-*/%()\[\],.])
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_ADVICE = {
    "$": "write the whole expression in one ${...}, with no ${} inside it",
    "=": "two values are compared with ==",
    "&": "use `and`",
    "|": "use `or`",
    "!": "use `not`, or != between two values",
    "'": "this string has no end",
    '"': "this string has no end",
    "`": "this name in backquotes has no end",
}


def read(text: str) -> tuple[Evaluate, set[Path]]:
    """Parse an expression. Return a function that evaluates it, and its paths."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"Expression {shortened(text)}: {len(text):,} characters, and at most {MAX_LENGTH:,} are allowed."
        )
    try:
        return _Parser(text).parse()
    except RecursionError:  # the caller's own stack is deep
        raise ExpressionError(f"Expression {shortened(text)}: nested too deeply.") from None


class _Parser:
    """A parser that looks at one token at a time: its kind, text and start."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0
        self._depth = 0
        self._paths: set[Path] = set()
        self._advance()

    def parse(self) -> tuple[Evaluate, set[Path]]:
        evaluate = self._chain(Level.OR)
        if self._kind != "end":
            self._expected("an operator")
        return evaluate, self._paths

    def _advance(self) -> None:
        self._previous_end = self._offset
        match = _TOKEN.match(self._text, self._offset)
        if match is None:
            position = len(self._text) - len(self._text[self._offset :].lstrip(" \t\r\n"))
            character = self._text[position]
            advice = f": {_ADVICE[character]}" if character in _ADVICE else ""
            self._fail(f"unexpected {character!r} at character {position + 1}{advice}")
        self._kind = match.lastgroup or ""
        self._token = match[self._kind]
        self._start = match.start(self._kind)
        self._offset = match.end()

    def _chain(self, lowest: int) -> Evaluate:
        """Parse operands and the operators between them that bind at least as tightly as `lowest`."""
        self._depth += 1
        if self._depth > DEEPEST:
            self._fail(f"nested more than {DEEPEST} levels deep")
        value = self._operand(lowest)
        current: Level | None = None
        links: Links = []
        while (next_operator := self._operator()) is not None and next_operator[0] >= lowest:
            level, operation = next_operator
            if level is current is Level.COMPARE:
                self._fail(f"comparisons cannot be chained (at character {self._start + 1}): join them with `and`")
            if level is not current:
                current, links = level, []
                value = chain(level, value, links)
            if operation is not_in:
                self._advance()
            self._advance()
            links.append((operation, self._chain(level + 1)))
        self._depth -= 1
        return value

    def _operator(self) -> tuple[Level, Operation] | None:
        if self._is("name", "not"):
            lookahead = _TOKEN.match(self._text, self._offset)
            return (Level.COMPARE, not_in) if lookahead and lookahead["name"] == "in" else None
        return OPERATORS.get(self._token) if self._kind in ("sign", "name") else None

    def _operand(self, lowest: int) -> Evaluate:
        if self._is("name", "not"):
            if lowest > Level.NOT:
                self._fail(f"`not` at character {self._start + 1} needs parentheses around it")
            self._advance()
            operand = self._chain(Level.NOT)
            return lambda names: not operand(names)
        if self._is("sign", "-"):
            self._advance()
            number = self._chain(Level.SIGN)
            return lambda names: negate(number(names))
        return self._path()

    def _path(self) -> Evaluate:
        start, name = self._start, self._token.strip("`")
        value = self._primary()
        field: str | None = None
        accesses: list[tuple[str | Evaluate, str]] = []
        while self._is("sign", ".") or self._is("sign", "["):
            prefix = self._text[start : self._previous_end]
            if self._is("sign", "["):
                self._advance()
                accesses.append((self._chain(Level.OR), prefix))
                self._expect("]")
                continue
            self._advance()
            if self._kind != "name":
                self._expected("the name of a field")
            if not accesses:
                field = self._token
            accesses.append((self._token, prefix))
            self._advance()
        if value is None:
            self._paths.add((name, field))
            value = functools.partial(look_up, name)
        return follow(value, accesses) if accesses else value

    def _primary(self) -> Evaluate | None:
        """Return the evaluation of a value, or None for a name."""
        kind, token = self._kind, self._token
        if kind == "number":
            number = self._number(token)
            self._advance()
            return lambda _: number
        if kind == "string":
            string = self._string(token)
            self._advance()
            return lambda _: string
        if kind == "name":
            return self._name(token)
        if kind == "quoted":
            self._advance()
            return None
        if token == "(":
            self._advance()
            inner = self._chain(Level.OR)
            self._expect(")")
            return inner
        if token == "[":
            self._advance()
            items = self._items("]")
            return lambda names: [item(names) for item in items]
        self._expected("a value")

    def _name(self, name: str) -> Evaluate | None:
        if name in LITERALS:
            literal = LITERALS[name]
            self._advance()
            return lambda _: literal
        if name in KEYWORDS:
            self._expected("a value")
        start = self._start
        self._advance()
        if not self._is("sign", "("):
            return None
        if name not in FUNCTIONS:
            names = ", ".join(FUNCTIONS)
            self._fail(
                f"unknown function {name!r} at character {start + 1}.{did_you_mean(name, FUNCTIONS)} Known: {names}"
            )
        self._advance()
        count, function = FUNCTIONS[name]
        arguments = self._items(")")
        if len(arguments) != count:
            self._fail(f"{name} at character {start + 1} takes {count} value{'s'[: count - 1]}, found {len(arguments)}")
        return function(*arguments)

    def _items(self, end: str) -> list[Evaluate]:
        items: list[Evaluate] = []
        while not self._is("sign", end):
            items.append(self._chain(Level.OR))
            if not self._is("sign", ","):
                break
            self._advance()
        self._expect(end)
        return items

    def _number(self, token: str) -> int | float:
        number = float(token) if not token.isdigit() else int(token) if len(token) <= 20 else math.inf
        if not fits(number):
            self._fail(f"the number at character {self._start + 1} is too large")
        return number

    def _string(self, token: str) -> str:
        def unescape(escape: re.Match[str]) -> str:
            if escape[1]:
                return chr(int(escape[1], 16))
            if escape[2] not in _ESCAPES:
                self._fail(f"unknown escape {escape[0]!r} in the string at character {self._start + 1}")
            return _ESCAPES[escape[2]]

        string = _ESCAPE.sub(unescape, token[1:-1])
        # As in JSON, two escapes may form a surrogate pair. A lone surrogate is replaced.
        return string.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _is(self, kind: str, token: str) -> bool:
        return self._kind == kind and self._token == token

    def _expect(self, sign: str) -> None:
        if not self._is("sign", sign):
            self._expected(f"`{sign}`")
        self._advance()

    def _expected(self, expected: str) -> NoReturn:
        token = "the end" if self._kind == "end" else f"`{self._token:.40}`"
        self._fail(f"expected {expected} at character {self._start + 1}, found {token}")

    def _fail(self, message: str) -> NoReturn:
        raise ExpressionError(f"Expression {shortened(self._text)}: {message}.")
