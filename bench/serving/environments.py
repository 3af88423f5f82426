"""Virtual environments for the servers beside ours, made once under `out/`; what cannot be had says why."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "out" / "bench-env"
PATIENCE_S = 900.0
PACKAGES = {
    "triton": ("nvidia-pytriton", "onnxruntime"),
    "kserve": ("kserve", "onnxruntime", "uvloop"),
    "mlserver": ("mlserver", "onnxruntime", "uvloop<0.22"),  # its workers ask for an event loop that is not there yet
    "bentoml": ("bentoml", "onnxruntime", "uvloop"),
    "litserve": ("litserve", "onnxruntime", "uvloop"),
    "floors": ("onnxruntime", "uvloop"),
}


class NotMeasured(Exception):
    """This contender cannot be had here; the text says why."""


@dataclass(frozen=True)
class Environment:
    """One contender's Python."""

    name: str

    @property
    def folder(self) -> Path:
        """Of the virtual environment."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @cached_property
    def packages(self) -> Path:
        """Where its packages lie."""
        return next(self.folder.glob("lib/python3*/site-packages"))

    def make(self) -> None:
        """Install what is missing; NotMeasured where that fails."""
        done = self.folder / ".installed"
        wanted = " ".join(PACKAGES[self.name])
        if done.is_file() and done.read_text(encoding="utf-8") == wanted:
            return
        print(f"installing {wanted} into {self.folder.relative_to(FOLDER.parents[1])}", flush=True)
        self._run([sys.executable, "-m", "venv", str(self.folder)])
        self._run([str(self.python), "-m", "pip", "install", "-q", *PACKAGES[self.name]])
        done.write_text(wanted, encoding="utf-8")

    def version(self) -> str:
        """Of its first package, as installed."""
        name = PACKAGES[self.name][0]
        ask = f"from importlib.metadata import version; print(version({name!r}))"
        return subprocess.run([str(self.python), "-c", ask], capture_output=True, text=True, timeout=60).stdout.strip()

    def _run(self, argv: list[str]) -> None:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"{self.name}: not installed within {PATIENCE_S:.0f} s") from None
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-200:]]
            raise NotMeasured(f"{self.name}: not installed: {last[-1][:300]}")
