"""What a doctor finds, and how it is told: each thing that is not right with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from edgesplit.msgspec_warmup import settle

Level = Literal["good", "warning", "bad"]
MARKS = {"good": "ok", "warning": "!!", "bad": "XX"}
BAD_EXIT = 1


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    level: Level
    said: str
    todo: str = ""
    """What to do, where it is not good."""


def good(name: str, said: str) -> Finding:
    """As it should be."""
    return Finding(name, "good", said)


def warning(name: str, said: str, todo: str) -> Finding:
    """It works, and will not for ever, or not as well as it could."""
    return Finding(name, "warning", said, todo)


def bad(name: str, said: str, todo: str) -> Finding:
    """It does not work."""
    return Finding(name, "bad", said, todo)


def exit_code(found: Sequence[Finding]) -> int:
    """0 unless something is bad."""
    return BAD_EXIT if any(one.level == "bad" for one in found) else 0


def printed(found: Sequence[Finding], *, as_json: bool) -> str:
    """For people, a line for each and one for what to do; or JSON."""
    if as_json:
        return json.dumps({"healthy": exit_code(found) == 0, "findings": msgspec.to_builtins(found)}, indent=2)
    width = max((len(one.name) for one in found), default=0)
    lines = []
    for one in found:
        lines.append(f"{MARKS[one.level]}  {one.name:<{width}}  {_plain(one.said)}")
        if one.todo:
            lines.append(f"    {'':<{width}}  -> {_plain(one.todo)}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """With nothing left in it that a terminal would obey: some of it was said by others."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


settle(__name__)
