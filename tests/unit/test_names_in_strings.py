"""Modules and tables that are found by a name in a string: a moved one fails here, and not in the field."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from itertools import pairwise

import pytest

import edgesplit
import edgesplit_partitioner
from edgesplit_agent.host.preload import OPTIONAL
from edgesplit_agent.self_update import launcher
from edgesplit_cli.main import COMMANDS, cli
from support import REPOSITORY

ROOMS = ("sdk", "partitioner", "agent", "offload", "cloud_controller", "provisioning", "simulation", "cli")
BETWEEN_VERSIONS = ("edgesplit_agent.main", "edgesplit_agent.version_check", "edgesplit_agent.self_update.launcher")
"""Modules that one version of the agent runs in another (docs/compatibility.md): these names never change."""
KNOWN_TABLES = "from edgesplit_controller.storage.schema import known_tables; print(*known_tables().tables, sep='\\n')"


def test_every_table_is_known_to_migrations_and_backups() -> None:
    """Whatever has been imported before: a table that is not known is neither made nor backed up."""
    declared = set()
    for path in (REPOSITORY / "cloud_controller" / "edgesplit_controller").rglob("*.py"):
        declared |= set(re.findall(r'^    __tablename__ = "(\w+)"', path.read_text(encoding="utf-8"), re.MULTILINE))
    done = subprocess.run([sys.executable, "-c", KNOWN_TABLES], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == declared
    assert len(declared) > 20


@pytest.mark.parametrize("name", BETWEEN_VERSIONS)
def test_entry_points_for_other_agent_versions_exist(name: str) -> None:
    """An older version checks and starts this one by these names."""
    assert importlib.util.find_spec(name) is not None
    assert launcher.MODULE in BETWEEN_VERSIONS


def test_modules_that_run_as_programs_exist() -> None:
    """Every `python -m` and `CHILD` of ours in the product, the images and the Makefile names a module."""
    files = [path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py") if "node_modules" not in path.parts]
    named = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List):
                words = [item.value for item in node.elts if isinstance(item, ast.Constant)]
                named |= {after for word, after in pairwise(words) if word == "-m"}
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named |= {node.value.value for target in targets if ast.unparse(target) == "CHILD"}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "run_child":
                named |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    for text in (REPOSITORY / "Makefile", *(REPOSITORY / "deploy").rglob("*.Dockerfile")):
        named |= set(re.findall(r"-m (edgesplit[\w.]+)", text.read_text(encoding="utf-8")))
    ours = {name for name in named if isinstance(name, str) and name.startswith("edgesplit")}
    assert len(ours) >= 12
    assert [name for name in sorted(ours) if importlib.util.find_spec(name) is None] == []


def test_modules_excluded_from_the_preload_exist() -> None:
    """A name in that list that no module has would let an optional engine fail every installation."""
    assert [name for name in OPTIONAL if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_in_its_module(name: str) -> None:
    """Commands are imported when they are called."""
    assert cli.commands[name].name == name


def test_lazily_imported_names_exist() -> None:
    """`edgesplit` and `edgesplit_partitioner` import what they export on its first use."""
    for package in (edgesplit, edgesplit_partitioner):
        for name in package.__all__:
            assert getattr(package, name) is not None
