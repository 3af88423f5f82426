"""What every benchmark writes: `{"machine", "versions", "results", "targets"}`, as DESIGN section 11 has it.

A script measures, makes a `Target` of each figure that an issue or document asked for, and calls `finish`: it prints
the targets, writes the JSON where `--json FILE` was given, and the script exits 0, met or not.
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

PACKAGES = ("edgesplit", "numpy", "scipy", "msgspec", "onnxruntime", "onnx", "ai-edge-litert", "zstandard")


@dataclass(frozen=True, slots=True)
class Target:
    """One figure with what it should be: at most `target`, or at least where `at_least` says so."""

    name: str
    measured: float | None
    """None where it could not be measured: a miss."""
    target: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """A figure that is missing or not a number meets nothing."""
        if self.measured is None:
            return False
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_json(self) -> dict[str, Any]:
        """As DESIGN section 11 has it."""
        return {"name": self.name, "measured": self.measured, "target": self.target, "met": self.met}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all scripts share; a script adds its own."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, results and targets there")
    return parser


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python's, and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that is not exceeded by this part of them."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def finish(results: Mapping[str, Any], targets: Sequence[Target], path: Path | None) -> None:
    """Print the targets, and write everything as JSON where a path was given."""
    for one in targets:
        shown = "not measured" if one.measured is None else f"{one.measured:.6g}"
        print(
            f"{'met   ' if one.met else 'MISSED'} {one.name}: {shown} ({'>=' if one.at_least else '<='} {one.target:g})"
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"machine": machine(), "versions": versions(), "results": results}
        whole |= {"targets": [one.as_json() for one in targets]}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
