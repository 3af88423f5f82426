"""What a model's file says about its pictures and classes, beside shapes and names: proposals are made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_NAME_BYTES = 1_000_000
"""Length of a list of names in a file, at most."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one model's file. Each may be absent."""

    producer: str = ""
    """The program that exported it, in lower case."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of an ONNX file, by key."""
    names: tuple[str, ...] = ()
    """Names of the classes, by index."""
    bound: Mapping[str, int] = field(default_factory=dict)
    """Lengths that free dimensions got because nobody gave one: batches of one."""


NO_HINTS = Hints()


def parse_names(text: str) -> tuple[str, ...]:
    """Names of classes as Ultralytics writes them, `{0: 'person', 1: 'bicycle'}`, or one in a line. Empty where it is
    neither."""
    if len(text) > MOST_NAME_BYTES:
        return ()
    if text.lstrip().startswith("{"):
        pairs = re.findall(r"(\d{1,6})\s*:\s*(?:'([^']*)'|\"([^\"]*)\")", text)
        by_index = {int(index): single or double for index, single, double in pairs}
        whole = sorted(by_index) == list(range(len(by_index)))
        return tuple(by_index[index] for index in range(len(by_index))) if whole else ()
    return tuple(line.strip() for line in text.splitlines())
