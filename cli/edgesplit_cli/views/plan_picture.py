"""`edgectl plan --plot`: draws a plan into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgesplit.errors import UsageError
from edgesplit_cli.output import check_writable
from edgesplit_partitioner.presentation.picture import render

ENDINGS = (".svg", ".png", ".pdf")


def draw(plan: dict[str, Any], file: Path) -> None:
    """Draw a plan as given by `edgesplit_partitioner.presentation.plan_json.describe`."""
    check_file(file)
    try:
        with file.open("wb") as into:
            render(plan, into, file.suffix.lower()[1:])
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def check_file(file: Path) -> None:
    """UsageError where no picture can be written; called before a long measurement."""
    if file.suffix.lower() not in ENDINGS:
        raise UsageError(f"cannot draw {file.name}: end it in {', '.join(ENDINGS)}")
    check_writable(file)
