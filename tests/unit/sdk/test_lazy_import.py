"""Packages that are deferred: nothing is loaded before the first use, and then all is as ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = """
import sys, {importer}
print("heavy.part" in sys.modules)
from edgesplit.lazy_import import defer_import
defer_import("heavy")
defer_import("not_installed_at_all")
import {importer}, importlib.util
import heavy as first
print("heavy.part" in sys.modules, importlib.util.find_spec("heavy").name, "not_installed_at_all" in sys.modules)
{use}
import heavy
print("heavy.part" in sys.modules, heavy.part.VALUE, first.VALUE, heavy.__path__ == sys.modules["heavy"].__path__)
"""


def printed(folder: Path, use: str, importer: str = "json") -> list[str]:
    """What a new process prints that uses a deferred package `heavy` in that way."""
    (folder / "heavy").mkdir()
    (folder / "heavy" / "__init__.py").write_text("from heavy.part import VALUE\n")
    (folder / "heavy" / "part.py").write_text("VALUE = 7\n")
    source = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + CHECK.format(use=use, importer=importer)
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_a_deferred_package_is_loaded_at_its_first_use(tmp_path: Path) -> None:
    """By an attribute of a module object that was imported before, which keeps working."""
    assert printed(tmp_path, "first.VALUE") == ["False", "False heavy False", "True 7 7 True"]


def test_a_module_of_a_deferred_package_can_be_imported(tmp_path: Path) -> None:
    """The package is loaded first, as ever."""
    assert printed(tmp_path, "import heavy.part") == ["False", "False heavy False", "True 7 7 True"]


def test_a_name_can_be_imported_from_a_deferred_package(tmp_path: Path) -> None:
    """`from heavy import NAME` loads it."""
    assert printed(tmp_path, "from heavy import VALUE") == ["False", "False heavy False", "True 7 7 True"]


def test_a_loaded_package_is_not_deferred(tmp_path: Path) -> None:
    """Nothing of it is imported a second time."""
    assert printed(tmp_path, "first.VALUE", importer="heavy") == ["True", "True heavy False", "True 7 7 True"]
