"""Options of commands that let a version stand in for another: on which samples that is seen, and what must be kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from edgesplit.errors import UsageError
from edgesplit.quantities import ABOVE_ZERO, Quantity, parse_percentage
from edgesplit_cli.options.types import EXISTING_PATH, ParsedType, option_group

POINTS = Quantity("number of percentage points", {"pp": 0.01}, "0.5pp")
_OPTIONS = option_group(
    click.option(
        "--samples", type=EXISTING_PATH,
        help="Folder of samples as the model's input arrives: JPEGs, or .npz. labels.json beside them (class by file"
        " name), or sub-folders named by class index, give accuracy too.",
    ),
    click.option(
        "--keep-accuracy", type=ParsedType("points", partial(POINTS.parse, least=ABOVE_ZERO, most=0.99)),
        help="Accuracy that may be lost at most, as in 0.5pp (percentage points).",
    ),
    click.option(
        "--keep-agreement", type=ParsedType("share", partial(parse_percentage, least=0.01, most=0.9999)),
        help="Answers that must stay as they are, as in 99%.",
    ),
    click.option(
        "--answer", metavar="RULE", default="",
        help="What an answer is, where the outputs leave it open: class:OUTPUT, boxes:LAYOUT[:THRESHOLD] or"
        " close:TOLERANCE.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The gate as it was typed."""

    samples: Path | None
    keep_accuracy: float | None
    keep_agreement: float | None
    answer: str

    @property
    def is_given(self) -> bool:
        """Whether any of the options was."""
        return self != GateOptions(None, None, None, "")

    def request(self) -> tuple[Path, dict[str, Any]]:
        """The folder of samples, and the rest as the API takes it; UsageError where something is missing."""
        if self.samples is None:
            raise UsageError("--samples: a version is judged on samples; give a folder of them")
        if self.keep_accuracy is None and self.keep_agreement is None:
            raise UsageError("say what must be kept: --keep-accuracy 0.5pp, --keep-agreement 99%, or both")
        gate = {
            "allowed_accuracy_loss": self.keep_accuracy, "least_agreement": self.keep_agreement,
            "answer": self.answer or None,
        }  # fmt: skip
        return self.samples, {name: value for name, value in gate.items() if value is not None}


def gate_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --samples, --keep-accuracy, --keep-agreement and --answer, which the command gets as `gate`."""

    @wraps(command)
    def with_gate(
        *arguments: Any, samples: Path | None, keep_accuracy: float | None, keep_agreement: float | None, answer: str,
        **options: Any,
    ) -> None:  # fmt: skip
        command(*arguments, gate=GateOptions(samples, keep_accuracy, keep_agreement, answer), **options)

    return _OPTIONS(with_gate)
