"""Which devices an operator means: a small language over names, groups and labels. Pure.

    expression  =  term, {"or", term}
    term        =  factor, {"and", factor}
    factor      =  ["not"], ( "(", expression, ")" | word | word, ("=" | "!="), value )
    value       =  word, {",", word}            one of them

    site=oslo and not kind=lab        group=cameras or cam-7        not (site=oslo,bergen) and group!=spare        all

A lone word is a device's name, or `all`; `group=` asks for the group, `class=` for the device profile, `name=` for the
name, anything else for a label. What is compared may end in `*`. Words that mean something else are written in quotes:
`name="not"`. An error points at the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from edgesplit.errors import UsageError

MOST_LETTERS = 1_000
MOST_WORDS = 200
DEEPEST = 20
KEYWORDS = ("and", "or", "not")
_TOKEN = re.compile(r"""\s*(?:(!=|[=(),])|"([^"]*)"|'([^']*)'|([\w./*-]+))""")


@dataclass(frozen=True, slots=True)
class Described:
    """What a device can be chosen by."""

    name: str
    device_class: str = ""
    group: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def value(self, key: str) -> str | None:
        """What it has under that key; None where it has no such label."""
        own = {"name": self.name, "group": self.group, "class": self.device_class}
        return own[key] if key in own else self.labels.get(key)


Test = Callable[[Described], bool]


@dataclass(frozen=True, slots=True)
class Selector:
    """An expression that was understood."""

    text: str
    test: Test
    names: frozenset[str]
    """Devices that it names: one that there is not is a typo."""
    asked: tuple[tuple[str, str], ...]
    """Every key and value that it compares, for hints."""

    def __call__(self, device: Described) -> bool:
        """Does it mean this device?"""
        return self.test(device)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`word`, `quoted`, one of the signs, or empty at the end."""
    text: str
    at: int


def parse_selector(text: str) -> Selector:
    """The expression that was spelt; UsageError points at what was not understood."""
    if len(text) > MOST_LETTERS:
        raise UsageError(f"an expression of {len(text)} letters, at most {MOST_LETTERS}: label the devices instead")
    return _Parser(text).parse()


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            start = at + len(text[at:]) - len(text[at:].lstrip())
            raise wrong(text, start, f"{text[start]!r} means nothing here")
        sign, double, single, word = match.groups()
        quoted = double if double is not None else single
        start = match.end() - len(match[0].lstrip())
        if sign:
            found.append(_Token(sign, sign, start))
        else:
            found.append(_Token("word" if quoted is None else "quoted", word if quoted is None else quoted, start))
        at = match.end()
        if len(found) > MOST_WORDS:
            raise wrong(text, start, f"more than {MOST_WORDS} words and signs: label the devices instead")
    return [*found, _Token("", "", len(text.rstrip()))]


def wrong(text: str, at: int, what: str) -> UsageError:
    """The error for one place of an expression, which it shows."""
    before, after = text[max(0, at - 30) : at], text[at : at + 30]
    return UsageError(f"{what}\n    {before}{after}\n    {' ' * len(before)}^")


class _Parser:
    """Recursive descent; depth and length are bounded."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._names: set[str] = set()
        self._asked: list[tuple[str, str]] = []

    def parse(self) -> Selector:
        test = self._expression(0)
        if self._next.kind:
            raise self._wrong("`and` or `or` must stand between two conditions")
        return Selector(self._text.strip(), test, frozenset(self._names), tuple(self._asked))

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _wrong(self, what: str) -> UsageError:
        return wrong(self._text, self._next.at, what)

    def _is(self, keyword: str) -> bool:
        return self._next.kind == "word" and self._next.text.lower() == keyword

    def _expression(self, depth: int) -> Test:
        return self._chain("or", lambda: self._chain("and", lambda: self._factor(depth), all), any)

    def _chain(self, keyword: str, part: Callable[[], Test], joined: Callable[[Collection[bool]], bool]) -> Test:
        parts = [part()]
        while self._is(keyword):
            self._take()
            parts.append(part())
        return parts[0] if len(parts) == 1 else lambda device: joined([test(device) for test in parts])

    def _factor(self, depth: int) -> Test:
        if depth > DEEPEST:
            raise self._wrong(f"more than {DEEPEST} conditions inside each other")
        if self._is("not"):
            self._take()
            test = self._factor(depth + 1)
            return lambda device: not test(device)
        if self._next.kind == "(":
            return self._bracketed(depth)
        return self._condition()

    def _bracketed(self, depth: int) -> Test:
        opened = self._take()
        test = self._expression(depth + 1)
        if self._next.kind != ")":
            raise wrong(self._text, opened.at, "this bracket is never closed")
        self._take()
        return test

    def _word(self, what: str) -> str:
        token = self._next
        if token.kind == "word" and token.text.lower() in KEYWORDS:
            raise self._wrong(f"{what} is missing before {token.text!r}; a word of the language is written in quotes")
        if token.kind not in ("word", "quoted"):
            raise self._wrong(f"{what} is missing" + (f" before {token.text!r}" if token.text else ""))
        return self._take().text

    def _condition(self) -> Test:
        key = self._word("a device, a group (group=NAME) or a label (KEY=VALUE)")
        if self._next.kind not in ("=", "!="):
            return self._named(key)
        differs = self._take().kind == "!="
        values = [self._word("a value")]
        while self._next.kind == ",":
            self._take()
            values.append(self._word("a value"))
        self._asked += [(key, value) for value in values]
        return _compared(key, tuple(values), differs)

    def _named(self, name: str) -> Test:
        if name == "all":
            return lambda device: True
        if "*" not in name:
            self._names.add(name)
        return _compared("name", (name,), differs=False)


def _compared(key: str, values: tuple[str, ...], differs: bool) -> Test:
    """A device without the label has none of the values: `!=` is true of it."""
    plain = frozenset(value for value in values if "*" not in value)
    patterns = tuple(value for value in values if "*" in value)

    def test(device: Described) -> bool:
        found = device.value(key)
        same = found is not None and (found in plain or any(fnmatchcase(found, one) for one in patterns))
        return same != differs

    return test
