"""What is installed is the built wheel, not the checkout: it must hold every room and the files they read."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from edgesplit_cli.demo.scenario import INPUT_SPEC
from support import REPOSITORY
from support.edgesplit_processes import DIGITS, Cloud

NEEDED = (
    "edgesplit/py.typed",
    "edgesplit_device_profiles/raspberrypi4.yaml",
    "edgesplit_cli/demo/digits/digits.onnx",
    "edgesplit_cli/demo/digits/frames/labels.json",
    "edgesplit_cli/demo/digits/held_out.npz",
    "edgesplit_cli/demo/digits/samples.py",
    "edgesplit_cli/demo/digits/student.onnx",
)
BUILT = REPOSITORY / "cloud_controller" / "edgesplit_controller" / "dashboard_assets"
BASE = ("msgspec", "numpy", "numpy.libs", "zstandard", "PIL", "pillow.libs", "httptools")
"""What a plain `pip install edgesplit` has, as folders of site-packages."""
OPERATOR = ("click", "rich", "pygments", "markdown_it", "mdurl", "cryptography", "_cffi_backend", "cffi", "packaging")
OPERATOR += ("yaml", "_yaml", "typing_extensions", "onnx", "google", "ml_dtypes")
"""What `edgesplit[operator]` adds: no planner, no runtime, no controller."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built offline."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    permitted = {} if BUILT.is_dir() else {"EDGESPLIT_WITHOUT_DASHBOARD": "1"}
    done = subprocess.run(argv, cwd=REPOSITORY, env={**os.environ, **permitted}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_contains_every_package_and_its_data_files(wheel: Path) -> None:
    """Every module of every package, device profiles, type marker, the demo's models and the dashboard, where it was
    built; no test and no cache."""
    names = set(zipfile.ZipFile(wheel).namelist())

    modules = {
        str(path.relative_to(room))
        for room in (path.parent for path in REPOSITORY.glob("*/edgesplit*") if path.is_dir())
        for path in room.glob("edgesplit*/**/*.py")
    }
    assert len(modules) > 600 and modules <= names
    assert set(NEEDED) <= names
    assets = {f"edgesplit_controller/dashboard_assets/{file.relative_to(BUILT)}" for file in BUILT.rglob("*.*")}
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


def install(wheel: Path, folder: Path, packages: tuple[str, ...]) -> None:
    """Unpack the wheel, with these packages of the present environment beside it."""
    zipfile.ZipFile(wheel).extractall(folder)
    site = Path(msgspec.__file__).parent.parent
    for name in packages:
        for found in (site / name, *site.glob(f"{name}.*")):
            if found.exists() and not (folder / found.name).exists():
                (folder / found.name).symlink_to(found)


def run_installed(folder: Path, module: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a console script of the installation in `folder`, which has no other packages than those there."""
    script = f"import sys; sys.path.append({str(folder)!r}); sys.argv = ['x', *{words!r}]; import {module} as start"
    script += "; sys.exit(start.main())"
    return subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("edgesplit_cli.start", ["up"], "cli"),
        ("edgesplit_cli.start", ["--version"], "cli"),
        ("edgesplit_agent.start", ["run"], "agent"),
        ("edgesplit_agent.start", ["status"], "agent"),
    ],
)
def test_commands_without_their_extra_say_what_to_install(
    wheel: Path, tmp_path: Path, module: str, words: list[str], extra: str
) -> None:
    """Only what a plain `pip install edgesplit` installs is there: the commands died with tracebacks."""
    install(wheel, tmp_path, BASE)
    done = run_installed(tmp_path, module, words)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"python -m pip install 'edgesplit[{extra}]'" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_wheel_carries_its_licence_and_classifiers(wheel: Path) -> None:
    """In the metadata that an index shows."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert "License-Expression: Apache-2.0" in metadata and "Author: The edgesplit authors" in metadata
    assert "Classifier: Programming Language :: Python :: 3.11" in metadata


def test_an_operators_machine_needs_no_planner_and_no_runtime(wheel: Path, tmp_path: Path) -> None:
    """`edgesplit[operator]` against a real controller: models, plans, claims, devices, rollouts. `edgectl up` needs
    more, and says what."""
    installed, cloud = tmp_path / "installed", Cloud(tmp_path, "--no-offload")
    installed.mkdir()
    install(wheel, installed, (*BASE, *OPERATOR))
    cloud.start()
    try:
        claim = tmp_path / "cam-1.claim.json"
        for words in (
            ["model", "push", str(DIGITS / "digits.onnx"), "--name", "digits", "--input", INPUT_SPEC],
            ["model", "list"],
            ["device", "claim", "cam-1", "--profile", "raspberrypi4", "--link", "wifi", "--out", str(claim)],
            ["device", "list"],
            ["plan", "digits", "--device", "raspberrypi4", "--link", "wifi"],
            ["rollout", "list"],
            ["fleet"],
            ["whoami"],
        ):
            done = run_installed(installed, "edgesplit_cli.start", ["--data", str(cloud.data), *words])
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    finally:
        cloud.stop()
    refused = run_installed(installed, "edgesplit_cli.start", ["--data", str(tmp_path / "other"), "up"])
    assert refused.returncode == 2 and "pip install 'edgesplit[cli]'" in refused.stderr, refused.stderr
