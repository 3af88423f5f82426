"""Selector expressions: a small language over names, groups and labels that selects devices. Pure functions.

    expression  =  term, {"or", term}
    term        =  factor, {"and", factor}
    factor      =  ["not"], ( "(", expression, ")" | word | word, ("=" | "!="), value )
    value       =  word, {",", word}            one of them

    site=oslo and not kind=lab        group=cameras or cam-7        not (site=oslo,bergen) and group!=spare        all

A lone word is a device's name, or `all`. `group=` compares the group, `class=` the device profile, `name=` the name,
any other key a label. A compared value may contain `*`. Words with another meaning are written in quotes: `name="not"`.
An error message points at its position.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from edgesplit.errors import UsageError

MAX_CHARS = 1_000
"""Limit of an expression's length, in characters."""
MAX_TOKENS = 200
"""Limit of tokens in an expression."""
MAX_DEPTH = 20
"""Limit of nesting."""
KEYWORDS = ("and", "or", "not")
_TOKEN = re.compile(r"""\s*(?:(!=|[=(),])|"([^"]*)"|'([^']*)'|([\w./*-]+))""")


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """The attributes of a device that a selector can test."""

    name: str
    device_class: str = ""
    group: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def value(self, key: str) -> str | None:
        """The device's value for this key; None if it has no such label."""
        own = {"name": self.name, "group": self.group, "class": self.device_class}
        return own[key] if key in own else self.labels.get(key)


Predicate = Callable[[DeviceAttributes], bool]
"""Whether a device matches a part of an expression."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed expression."""

    text: str
    test: Predicate
    names: frozenset[str]
    """Device names in the expression: one that does not exist is an error."""
    comparisons: tuple[tuple[str, str], ...]
    """Every key and value that the expression compares, for hints in errors."""

    def __call__(self, device: DeviceAttributes) -> bool:
        """Whether the expression selects this device."""
        return self.test(device)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`word`, `quoted`, one of the signs, or empty at the end."""
    text: str
    at: int


def parse_selector(text: str) -> Selector:
    """Parse an expression; UsageError, pointing at the position, if that fails."""
    if len(text) > MAX_CHARS:
        raise UsageError(f"an expression of {len(text)} letters, at most {MAX_CHARS}: label the devices instead")
    return _Parser(text).parse()


def _tokenise(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            raise error_at(text, start, f"{text[start]!r} is not part of the language")
        sign, double_quoted, single_quoted, word = match.groups()
        quoted = double_quoted if double_quoted is not None else single_quoted
        start = match.end() - len(match[0].lstrip())
        if sign:
            tokens.append(_Token(sign, sign, start))
        else:
            tokens.append(_Token("word" if quoted is None else "quoted", word if quoted is None else quoted, start))
        position = match.end()
        if len(tokens) > MAX_TOKENS:
            raise error_at(text, start, f"more than {MAX_TOKENS} words and signs: label the devices instead")
    return [*tokens, _Token("", "", len(text.rstrip()))]


def error_at(text: str, at: int, what: str) -> UsageError:
    """A UsageError that shows the expression and marks a position in it."""
    before, after = text[max(0, at - 30) : at], text[at : at + 30]
    return UsageError(f"{what}\n    {before}{after}\n    {' ' * len(before)}^")


class _Parser:
    """Recursive-descent parser with bounded depth and length."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokenise(text)
        self._at = 0
        self._names: set[str] = set()
        self._comparisons: list[tuple[str, str]] = []

    def parse(self) -> Selector:
        test = self._expression(0)
        if self._next.kind:
            raise self._error("`and` or `or` must stand between two conditions")
        return Selector(self._text.strip(), test, frozenset(self._names), tuple(self._comparisons))

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _advance(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _error(self, what: str) -> UsageError:
        return error_at(self._text, self._next.at, what)

    def _is_keyword(self, keyword: str) -> bool:
        return self._next.kind == "word" and self._next.text.lower() == keyword

    def _expression(self, depth: int) -> Predicate:
        # `or` binds weaker than `and`: an expression is a chain of `or` over chains of `and`.
        return self._chain("or", lambda: self._chain("and", lambda: self._factor(depth), all), any)

    def _chain(
        self, keyword: str, part: Callable[[], Predicate], joined: Callable[[Collection[bool]], bool]
    ) -> Predicate:
        parts = [part()]
        while self._is_keyword(keyword):
            self._advance()
            parts.append(part())
        return parts[0] if len(parts) == 1 else lambda device: joined([test(device) for test in parts])

    def _factor(self, depth: int) -> Predicate:
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} conditions inside each other")
        if self._is_keyword("not"):
            self._advance()
            test = self._factor(depth + 1)
            return lambda device: not test(device)
        if self._next.kind == "(":
            return self._bracketed(depth)
        return self._condition()

    def _bracketed(self, depth: int) -> Predicate:
        opened = self._advance()
        test = self._expression(depth + 1)
        if self._next.kind != ")":
            raise error_at(self._text, opened.at, "this bracket is not closed")
        self._advance()
        return test

    def _word(self, what: str) -> str:
        token = self._next
        if token.kind == "word" and token.text.lower() in KEYWORDS:
            raise self._error(f"{what} is missing before {token.text!r}; a word of the language is written in quotes")
        if token.kind not in ("word", "quoted"):
            raise self._error(f"{what} is missing" + (f" before {token.text!r}" if token.text else ""))
        return self._advance().text

    def _condition(self) -> Predicate:
        key = self._word("a device, a group (group=NAME) or a label (KEY=VALUE)")
        if self._next.kind not in ("=", "!="):
            return self._by_name(key)
        differs = self._advance().kind == "!="
        values = [self._word("a value")]
        while self._next.kind == ",":
            self._advance()
            values.append(self._word("a value"))
        self._comparisons += [(key, value) for value in values]
        return _comparison(key, tuple(values), differs)

    def _by_name(self, name: str) -> Predicate:
        if name == "all":
            return lambda device: True
        if "*" not in name:
            self._names.add(name)
        return _comparison("name", (name,), differs=False)


def _comparison(key: str, values: tuple[str, ...], differs: bool) -> Predicate:
    """A comparison of one key. A device without the label has none of the values, so that `!=` is true for it."""
    exact_values = frozenset(value for value in values if "*" not in value)
    patterns = tuple(value for value in values if "*" in value)

    def test(device: DeviceAttributes) -> bool:
        actual = device.value(key)
        is_match = actual is not None and (
            actual in exact_values or any(fnmatchcase(actual, pattern) for pattern in patterns)
        )
        return is_match != differs

    return test
