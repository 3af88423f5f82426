"""The rooms of docs/architecture.md: imports point one way, and nothing is named after what it is not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SDK, PARTITIONER, AGENT = "edgesplit", "edgesplit_partitioner", "edgesplit_agent"
OFFLOAD, CONTROLLER, CLI = "edgesplit_offload", "edgesplit_controller", "edgesplit_cli"
PROFILES = "edgesplit_device_profiles"
ROOMS = {
    SDK: "sdk/edgesplit",
    PARTITIONER: "partitioner/edgesplit_partitioner",
    AGENT: "agent/edgesplit_agent",
    OFFLOAD: "offload/edgesplit_offload",
    CONTROLLER: "cloud_controller/edgesplit_controller",
    CLI: "cli/edgesplit_cli",
    PROFILES: "device_profiles/edgesplit_device_profiles",
}
MAY_IMPORT = {
    SDK: {SDK},
    PROFILES: {PROFILES},
    PARTITIONER: {SDK, PARTITIONER},
    AGENT: {SDK, AGENT},
    OFFLOAD: {SDK, OFFLOAD},
    CONTROLLER: {SDK, PARTITIONER, CONTROLLER},
    CLI: {SDK, PARTITIONER, AGENT, OFFLOAD, CONTROLLER, CLI},
}
NOT_ON_A_DEVICE = {"fastapi", "uvicorn", "sqlalchemy", "scipy", "onnx", "matplotlib", "click", "rich"}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All that a file says, read once for all tests here."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_of(path: Path) -> Iterator[str]:
    """Top-level names of the packages that a file imports, wherever in the file."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_at_the_sdk_and_never_back(room: str) -> None:
    """A room imports only the rooms that the architecture allows it."""
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in (REPOSITORY / ROOMS[room]).rglob("*.py")
        for name in imports_of(path)
        if name in ROOMS and name not in MAY_IMPORT[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("room", [SDK, AGENT, OFFLOAD])
def test_what_runs_on_a_device_needs_no_cloud_library(room: str) -> None:
    """The agent installs on a Raspberry Pi: what only the controller needs stays out of its imports."""
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in (REPOSITORY / ROOMS[room]).rglob("*.py")
        for name in imports_of(path)
        if name in NOT_ON_A_DEVICE
    ]
    assert wrong == []


def test_no_module_is_named_after_nothing() -> None:
    """Names come from the domain."""
    nameless = {"utils", "util", "common", "helpers", "helper", "misc"}
    found = [path for folder in ROOMS.values() for path in (REPOSITORY / folder).rglob("*") if path.stem in nameless]
    assert found == []


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Bytes from a network or a model file are never unpickled, evaluated or executed."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    wrong = []
    for folder in ROOMS.values():
        for path in (REPOSITORY / folder).rglob("*.py"):
            calls = {
                node.func.id
                for node in nodes_of(path)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            if forbidden & set(imports_of(path)) or calls & {"eval", "exec"}:
                wrong.append(str(path.relative_to(REPOSITORY)))
    assert wrong == []
