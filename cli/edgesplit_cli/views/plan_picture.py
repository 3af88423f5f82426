"""`edgectl plan --plot`: the picture of a plan, in a file of the operator's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgesplit.errors import UsageError
from edgesplit_cli.output import can_write
from edgesplit_partitioner.presentation.picture import render

ENDINGS = (".svg", ".png", ".pdf")


def draw(made: dict[str, Any], file: Path) -> None:
    """Write the picture of `made`, as `edgesplit_partitioner.presentation.plan_json.describe` gives it."""
    check_place(file)
    try:
        with file.open("wb") as into:
            render(made, into, file.suffix.lower()[1:])
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def check_place(file: Path) -> None:
    """UsageError where no picture can be written: better before a long measurement than after it."""
    if file.suffix.lower() not in ENDINGS:
        raise UsageError(f"cannot draw {file.name}: end it in {', '.join(ENDINGS)}")
    can_write(file)
