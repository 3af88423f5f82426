"""What frames show, as people or tools drew it: a JSON file beside each sample, by which families of detectors are
judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edgesplit.errors import UsageError

EXAMPLE = '[{"box": [0.1, 0.2, 0.5, 0.9], "label": 3}]'


class DrawnBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a file."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom, as parts of the frame's width and height."""
    label: int


def boxes_of(sample: Path) -> list[dict[str, Any]] | None:
    """The boxes that the file beside a sample lists (of `a.jpg` it is `a.json`), as the API takes them; None where
    there is no such file. UsageError where it cannot be read, or a box has no area within the frame."""
    file = sample.with_suffix(".json")
    try:
        drawn = msgspec.json.decode(file.read_bytes(), type=list[DrawnBox])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file}: {error}; it should list what the frame shows, as in {EXAMPLE}") from error
    for one in drawn:
        left, top, right, bottom = one.box
        if not (0.0 <= left < right <= 1.0 and 0.0 <= top < bottom <= 1.0):
            raise UsageError(
                f"{file}: {list(one.box)} is no box: left, top, right and bottom are parts of the frame's width and"
                f" height, from 0 to 1, as in {EXAMPLE}"
            )
    built: list[dict[str, Any]] = msgspec.to_builtins(drawn)
    return built
