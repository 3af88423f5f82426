"""The record that every benchmark writes: `{"machine", "versions", "results", "targets"}`, by DESIGN section 11.

A script measures, makes a `Target` of each figure that an issue or document asks for, and calls `finish`: it prints the
targets and writes the JSON where `--json FILE` was given. The script exits with 0 whether the targets are met or not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

MODELS = "EDGESPLIT_MODELS"
"""Environment variable with the folder of the trained reference models, as for the tests."""
PACKAGES = ("edgesplit", "numpy", "scipy", "msgspec", "onnxruntime", "onnx", "ai-edge-litert", "zstandard")
"""Packages whose versions are recorded."""


@dataclass(frozen=True, slots=True)
class Target:
    """A measured figure with its target: at most `target`, or at least `target` where `at_least` is set.

    It is met only by a figure that was measured on all that the target names.
    """

    name: str
    measured: float | None
    """The figure; None where it could not be measured, which counts as a miss."""
    target: float
    at_least: bool = False
    left_out: tuple[str, ...] = ()
    """What the target names and the figure was not measured on, each with the reason."""

    @property
    def met(self) -> bool:
        """Whether the target is met; a figure that is missing, incomplete or not a number does not meet it."""
        if self.measured is None or self.left_out:
            return False
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_json(self) -> dict[str, Any]:
        """The target as JSON, by DESIGN section 11."""
        told = {"name": self.name, "measured": self.measured, "target": self.target, "met": self.met}
        return told | ({"left_out": list(self.left_out)} if self.left_out else {})

    def text(self) -> str:
        """The target as the line that is printed: met or missed, the figure, and what it was not measured on."""
        shown = "not measured" if self.measured is None else f"{self.measured:.6g}"
        line = f"{'met   ' if self.met else 'MISSED'} {self.name}: {shown} ({'>=' if self.at_least else '<='} "
        missing = f"; not measured on {', '.join(self.left_out)}" if self.left_out else ""
        return f"{line}{self.target:g}){missing}"


def models_folder() -> Path:
    """Folder of the trained reference models: `EDGESPLIT_MODELS`, else `shared/models` beside the repository."""
    return Path(os.environ.get(MODELS) or Path(__file__).parents[2] / "shared" / "models")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option `--json`, which all scripts share; a script adds its own options."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, results and targets there")
    return parser


def machine() -> dict[str, Any]:
    """Description of the machine, its load included."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def percentile(values: Sequence[float], fraction: float) -> float:
    """The least of the values that is not exceeded by the part `fraction` of them."""
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


def finish(results: Mapping[str, Any], targets: Sequence[Target], path: Path | None) -> None:
    """Print the targets, and write the record as JSON where a path was given."""
    for target in targets:
        print(target.text())
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole: dict[str, Any] = {"machine": machine(), "versions": versions(), "results": results}
        whole |= {"targets": [target.as_json() for target in targets]}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
