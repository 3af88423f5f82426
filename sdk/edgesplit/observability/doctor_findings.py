"""The findings of `edgesplit-agent doctor` and `edgectl doctor`, and their output: each problem with its remedy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs

Level = Literal["good", "warning", "bad"]
MARKS = {"good": "ok", "warning": "!!", "bad": "XX"}
BAD_EXIT = 1


class Finding(msgspec.Struct, frozen=True):
    """Result of one check."""

    name: str
    level: Level
    said: str
    """What was found."""
    todo: str = ""
    """Remedy; empty where the result is good."""


def good(name: str, detail: str) -> Finding:
    """A finding that nothing is wrong."""
    return Finding(name, "good", detail)


def warning(name: str, detail: str, todo: str) -> Finding:
    """A finding that works now, but not permanently, or not as well as it could."""
    return Finding(name, "warning", detail, todo)


def bad(name: str, detail: str, todo: str) -> Finding:
    """A finding that does not work."""
    return Finding(name, "bad", detail, todo)


def exit_code(findings: Sequence[Finding]) -> int:
    """`BAD_EXIT` where any finding is bad, otherwise 0."""
    return BAD_EXIT if any(finding.level == "bad" for finding in findings) else 0


def format_findings(findings: Sequence[Finding], *, as_json: bool) -> str:
    """The findings as text for people, with a line for each and one for its remedy, or as JSON."""
    if as_json:
        return json.dumps({"healthy": exit_code(findings) == 0, "findings": msgspec.to_builtins(findings)}, indent=2)
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.level]}  {finding.name:<{width}}  {_plain(finding.said)}")
        if finding.todo:
            lines.append(f"    {'':<{width}}  -> {_plain(finding.todo)}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """`text` with unprintable characters replaced: some of it comes from other machines."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


warm_up_structs(__name__)
