"""Virtual environments for the servers other than ours, made once under `out/`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "out" / "bench-env"
TIMEOUT_S = 900.0
"""Seconds after which an installation counts as failed."""
PACKAGES = {
    "triton": ("nvidia-pytriton", "onnxruntime"),
    "kserve": ("kserve", "onnxruntime", "uvloop"),
    "mlserver": ("mlserver", "onnxruntime", "uvloop<0.22"),  # its workers ask for an event loop that is not there yet
    "bentoml": ("bentoml", "onnxruntime", "uvloop"),
    "litserve": ("litserve", "onnxruntime", "uvloop"),
    "floors": ("onnxruntime", "uvloop"),
}


class NotMeasured(Exception):
    """Raised where a contender cannot be installed or does not work here; the message gives the reason."""


@dataclass(frozen=True)
class Environment:
    """The virtual environment of one contender."""

    name: str

    @property
    def folder(self) -> Path:
        """Path of the virtual environment."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Path of its interpreter."""
        return self.folder / "bin" / "python"

    @cached_property
    def packages(self) -> Path:
        """Path of its site-packages."""
        return next(self.folder.glob("lib/python3*/site-packages"))

    def make(self) -> None:
        """Create the environment and install what is missing; NotMeasured where that fails."""
        done = self.folder / ".installed"
        wanted = " ".join(PACKAGES[self.name])
        if done.is_file() and done.read_text(encoding="utf-8") == wanted:
            return
        print(f"installing {wanted} into {self.folder.relative_to(FOLDER.parents[1])}", flush=True)
        self._run([sys.executable, "-m", "venv", str(self.folder)])
        self._run([str(self.python), "-m", "pip", "install", "-q", *PACKAGES[self.name]])
        done.write_text(wanted, encoding="utf-8")

    def version(self) -> str:
        """Installed version of the environment's first package."""
        name = PACKAGES[self.name][0]
        ask = f"from importlib.metadata import version; print(version({name!r}))"
        return subprocess.run([str(self.python), "-c", ask], capture_output=True, text=True, timeout=60).stdout.strip()

    def _run(self, argv: list[str]) -> None:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"{self.name}: not installed within {TIMEOUT_S:.0f} s") from None
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-200:]]
            raise NotMeasured(f"{self.name}: not installed: {last[-1][:300]}")
