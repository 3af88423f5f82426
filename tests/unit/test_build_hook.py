"""The build hook: a wheel has the dashboard, or the build fails with the reason."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import REPOSITORY

PAGE = Path("cloud_controller", "edgesplit_controller", "dashboard_assets", "index.html")
BUILDS = f'#!/bin/sh\nmkdir -p {PAGE.parent} && echo "$1 $EDGESPLIT_BUILD_PYTHON" > {PAGE}\n'
FAILS = "#!/bin/sh\necho 'dashboard: npm is out of reach' >&2\nexit 3\n"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """`hatch_build.py` as hatchling loads it."""
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one source of the dashboard, and no built file."""
    monkeypatch.delenv("EDGESPLIT_WITHOUT_DASHBOARD", raising=False)
    source = tmp_path / "cloud_controller" / "dashboard" / "app.tsx"
    source.parent.mkdir(parents=True)
    source.write_text("x")
    return tmp_path


def with_tool(tree: Path, script: str) -> None:
    tool = tree / "tools" / "dashboard"
    tool.parent.mkdir()
    tool.write_text(script)
    tool.chmod(0o755)


def initialize(hook: ModuleType, tree: Path, version: str = "standard") -> None:
    hook.DashboardHook(str(tree), {}, None, None, "", "wheel").initialize(version, {})


def test_a_clean_clone_builds_its_dashboard_into_the_wheel(hook: ModuleType, tree: Path) -> None:
    """It was left out in silence. The tool is told in which environment Node.js is."""
    with_tool(tree, BUILDS)
    initialize(hook, tree)
    assert (tree / PAGE).read_text() == f"build {sys.executable}\n"


def test_a_build_without_dashboard_fails_with_the_reason(hook: ModuleType, tree: Path) -> None:
    """With what the tool said, and the variable that permits it."""
    with_tool(tree, FAILS)
    with pytest.raises(RuntimeError, match=r"(?s)npm is out of reach.*EDGESPLIT_WITHOUT_DASHBOARD=1"):
        initialize(hook, tree)
    (tree / "tools" / "dashboard").unlink()
    with pytest.raises(RuntimeError, match="there is no tools/dashboard here"):
        initialize(hook, tree)


def test_the_variable_and_an_editable_installation_permit_it(
    hook: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter is a checkout's, where `tools/setup` builds it."""
    with_tool(tree, FAILS)
    initialize(hook, tree, "editable")
    monkeypatch.setenv("EDGESPLIT_WITHOUT_DASHBOARD", "1")
    initialize(hook, tree)
    assert hook.DashboardHook(str(tree), {}, None, None, "", "wheel").dependencies() == []


def test_a_stale_dashboard_is_built_anew_and_a_fresh_one_is_taken(hook: ModuleType, tree: Path) -> None:
    """By the sources' times; a tree without the tool, as an sdist has one, is taken as it is."""
    (tree / PAGE).parent.mkdir(parents=True)
    (tree / PAGE).write_text("built before")
    source = tree / "cloud_controller" / "dashboard" / "app.tsx"
    os.utime(source, (1, 1))
    initialize(hook, tree)
    os.utime(source)
    os.utime(tree / PAGE, (1, 1))
    initialize(hook, tree)
    assert (tree / PAGE).read_text() == "built before"
    with_tool(tree, BUILDS)
    initialize(hook, tree)
    assert (tree / PAGE).read_text().startswith("build ")
