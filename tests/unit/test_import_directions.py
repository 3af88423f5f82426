"""The rooms and packages of docs/architecture.md: imports have one direction, and no module has a generic name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from support import REPOSITORY

SDK, PARTITIONER, AGENT = "edgesplit", "edgesplit_partitioner", "edgesplit_agent"
OFFLOAD, CONTROLLER, CLI = "edgesplit_offload", "edgesplit_controller", "edgesplit_cli"
PROVISIONING, SIMULATION, PROFILES = "edgesplit_provisioning", "edgesplit_simulation", "edgesplit_device_profiles"
ROOMS = {
    SDK: "sdk/edgesplit",
    PARTITIONER: "partitioner/edgesplit_partitioner",
    AGENT: "agent/edgesplit_agent",
    OFFLOAD: "offload/edgesplit_offload",
    CONTROLLER: "cloud_controller/edgesplit_controller",
    PROVISIONING: "provisioning/edgesplit_provisioning",
    SIMULATION: "simulation/edgesplit_simulation",
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
    PROVISIONING: {SDK, PROVISIONING},
    SIMULATION: {SDK, PARTITIONER, AGENT, CONTROLLER, SIMULATION},
    CLI: {SDK, PARTITIONER, AGENT, OFFLOAD, CONTROLLER, PROVISIONING, SIMULATION, CLI},
}
LAYERS: Mapping[str, tuple[str, ...]] = {
    SDK: (
        "atomic_files audit_chain backoff concurrency errors file_hash lazy_import limits missing_packages "
        "msgspec_warmup socket_send terminal_text",
        "cascade decoding picture_fit picture_formats",
        "bandwidth_trace foreign_server http1 identifiers input_spec mqtt output_kind plan process quantities",
        "variant_choice",
        "link_emulation links observability release testing",
        "answers crypto oip",
        "shared_memory trust",
        "controller_client",
        "client oip_server release_store runtime",
        "device_profile offload_client",
    ),
    PARTITIONER: (
        "arrays bounds ir sandbox",
        "algorithms onnx_format slicing tflite_format",
        "edgetpu family_slicing model_loader proposals",
        "costs",
        "formulation profiling",
        "calibration compression milp split_check",
        "planner",
        "presentation",
    ),
    AGENT: (
        "host power state worker",
        "policy releases",
        "offload self_update telemetry",
        "control serving",
        "service updates",
        "agent",
        "main",
        "start version_check",
    ),
    OFFLOAD: (
        "processes revocation scheduling",
        "frontend models",
        "batching observability",
        "inference",
        "options server",
        "serving_process",
        "main",
    ),
    CONTROLLER: (
        "caller errors periodic_thread pki settings status",
        "job_progress storage tuf",
        "access backup history messaging model_registry",
        "planning",
        "fleet",
        "components releases",
        "rollout",
        "observability replan retention",
        "controller",
        "dashboard",
        "api",
        "app",
    ),
    PROVISIONING: ("agent_options bundle flash_options kit os_release profiles", "wifi", "image jetson", "ssh"),
    SIMULATION: (
        "invariants releases",
        "controller device",
        "fleet_members",
        "fleet real_controller",
        "faults",
        "summary",
        "run",
    ),
    CLI: (
        "export_files kept_options lazy_commands output settings",
        "progress",
        "demo doctor flash local options signing",
        "main operator_keys sample_upload views",
        "commands reference start",
    ),
}
"""Packages and root modules of each room in their order: whatever stands in a line imports from lines above it only."""
NOT_ON_A_DEVICE = {"fastapi", "uvicorn", "sqlalchemy", "scipy", "onnx", "matplotlib", "click", "rich"}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, parsed once for all tests here."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def modules() -> Mapping[str, Path]:
    """Every module of the rooms by its dotted name; packages by their own."""
    by_name = {}
    for room in LAYERS:
        folder = REPOSITORY / ROOMS[room]
        for path in folder.rglob("*.py"):
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            by_name[name.removesuffix(".__init__")] = path
    return by_name


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of our modules that a file imports, wherever in the file."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules() or node.module in modules():
                    yield name if name in modules() else node.module


def imports_of(path: Path) -> Iterator[str]:
    """Top-level names of the packages that a file imports, wherever in the file."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_the_allowed_rooms(room: str) -> None:
    """A room imports only the rooms that the architecture allows it."""
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in (REPOSITORY / ROOMS[room]).rglob("*.py")
        for name in imports_of(path)
        if name in ROOMS and name not in MAY_IMPORT[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("room", LAYERS)
def test_packages_import_lower_packages_only(room: str) -> None:
    """Within a room each package and root module stands in one layer, and imports from the layers below it."""
    layer_of = {name: number for number, line in enumerate(LAYERS[room]) for name in line.split()}
    assert sum(len(line.split()) for line in LAYERS[room]) == len(layer_of), "a name stands in two layers"
    present = {name.split(".")[1] for name in modules() if name.startswith(f"{room}.")}
    assert present == set(layer_of)
    wrong = []
    for name, path in modules().items():
        if not name.startswith(f"{room}."):
            continue  # the room's own __init__ re-exports for users
        package = name.split(".")[1]
        for imported in imported_modules(path):
            if not imported.startswith(f"{room}."):
                continue
            other = imported.split(".")[1]
            if other != package and layer_of[other] >= layer_of[package]:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    """Of any two modules one can be read, tested and imported without the other. A room's own __init__, which
    re-exports names for users on their first use, is left out."""
    graph = {
        name: {other for other in imported_modules(path) if other != name and other not in ROOMS}
        for name, path in modules().items()
        if name not in ROOMS
    }
    while leaves := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert sorted(graph) == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in (SDK, SIMULATION)])
def test_production_code_imports_no_test_code(room: str) -> None:
    """`edgesplit.testing` serves tests and simulations."""
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if name.split(".")[0] == room
        for imported in imported_modules(path)
        if imported.startswith("edgesplit.testing")
    ]
    assert wrong == []


def test_every_package_has_a_docstring() -> None:
    """It states what the package is for and what it may import."""
    silent = [
        name
        for name, path in modules().items()
        if path.name == "__init__.py" and len(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") < 60
    ]
    assert silent == []


@pytest.mark.parametrize("room", [SDK, AGENT, OFFLOAD])
def test_device_code_imports_no_cloud_library(room: str) -> None:
    """The agent installs on a Raspberry Pi: what only the controller needs stays out of its imports."""
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in (REPOSITORY / ROOMS[room]).rglob("*.py")
        for name in imports_of(path)
        if name in NOT_ON_A_DEVICE
    ]
    assert wrong == []


def test_no_module_has_a_generic_name() -> None:
    """Names come from the domain."""
    nameless = {"utils", "util", "common", "helpers", "helper", "misc"}
    found = [path for folder in ROOMS.values() for path in (REPOSITORY / folder).rglob("*") if path.stem in nameless]
    assert found == []


def test_no_code_unpickles_or_evaluates_input() -> None:
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
