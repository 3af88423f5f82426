"""What is installed is the built wheel, not the checkout: it must hold every room and the files they read."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import REPOSITORY

NEEDED = (
    "edgesplit/py.typed",
    "edgesplit_device_profiles/raspberrypi4.yaml",
    "edgesplit_cli/demo/digits/digits.onnx",
    "edgesplit_cli/demo/digits/frames/labels.json",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built offline."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_contains_every_package_and_its_data_files(wheel: Path) -> None:
    """Every module of every package, device profiles, type marker, the demo's model and the dashboard, where it was
    built; no test and no cache."""
    names = set(zipfile.ZipFile(wheel).namelist())

    modules = {
        str(path.relative_to(room))
        for room in (path.parent for path in REPOSITORY.glob("*/edgesplit*") if path.is_dir())
        for path in room.glob("edgesplit*/**/*.py")
    }
    assert len(modules) > 600 and modules <= names
    assert set(NEEDED) <= names
    built = REPOSITORY / "cloud_controller" / "edgesplit_controller" / "dashboard_assets"
    assets = {f"edgesplit_controller/dashboard_assets/{file.relative_to(built)}" for file in built.rglob("*.*")}
    assert assets <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_the_installed_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, with no checkout on the path, the commands start and find their data."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    script = (
        f"import sys\nsys.path[:] = [p for p in sys.path if not p.startswith({str(REPOSITORY)!r}) or 'site-' in p]\n"
        f"sys.path.insert(0, {str(tmp_path / 'installed')!r})\n"
        "import edgesplit_cli.main, edgesplit_agent.main, edgesplit_offload.main, edgesplit_simulation.run\n"
        "from edgesplit.device_profile import load_profile, list_profiles\n"
        "from edgesplit_cli.demo.run import digits_folder\n"
        "assert edgesplit_cli.main.__file__.startswith(sys.path[0]), edgesplit_cli.main.__file__\n"
        "assert 'demo' in str(digits_folder()) and [load_profile(name) for name in list_profiles()]\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, check=True)
