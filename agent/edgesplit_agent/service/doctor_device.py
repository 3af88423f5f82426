"""Doctor's checks of the device itself: data folder, disk space, memory, power, engines, service."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

import edgesplit
from edgesplit.errors import LinkError
from edgesplit.observability.doctor_findings import Finding, bad, good, warning
from edgesplit.process.confinement import unavailable
from edgesplit_agent.host.machine import installed_versions, machine_figures
from edgesplit_agent.power.sensors import read
from edgesplit_agent.releases.chunk_store import bytes_on_disk
from edgesplit_agent.releases.disk_quota import RESERVE_BYTES
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.service.doctor_edge_tpu import check_edge_tpu
from edgesplit_agent.service.systemd_unit import NAME
from edgesplit_agent.serving.http_endpoint import read_status
from edgesplit_agent.state.data_folder import AgentAddress, DataFolder

LITTLE_DISK_BYTES = 512 << 20
LITTLE_MEMORY_BYTES = 150 << 20
WARM_CELSIUS = 80.0
DEPLOY_AGAIN = "deploy another version, or this one again: `edgectl agent deploy`"
ENGINES = {"onnxruntime": "onnxruntime", "ai_edge_litert": "ai-edge-litert", "tflite_runtime": "tflite-runtime"}


def check_data_folder(folder: DataFolder) -> Iterator[Finding]:
    """The data folder exists, belongs to its owner alone, and can be written."""
    path = folder.path
    if not path.is_dir():
        yield bad("folder", f"there is no {path}", "install the agent (install.sh), or name its folder with --data")
        return
    status = path.stat()
    owner = _user(status.st_uid)
    keys = (folder.key_file, folder.encryption_key_file, folder.renewed_file)
    readable_keys = [key for key in keys if _open_to_others(key)]
    if readable_keys:
        yield bad("folder", f"other users can read the private key {readable_keys[0]}", f"chmod 600 {readable_keys[0]}")
    elif status.st_mode & 0o006:  # to pass through it (0711) is what the agent allows users of its socket
        yield warning("folder", f"other users can list {path}", f"chmod 700 {path}")
    elif not os.access(path, os.W_OK):
        yield bad(
            "folder", f"{path} belongs to {owner} and cannot be written by this user", f"run as {owner}, or as root"
        )
    else:
        yield good("folder", f"{path} of {owner}")
    foreign_files = [file for file in sorted(path.iterdir()) if file.lstat().st_uid != status.st_uid]
    if foreign_files:
        yield bad("owner", f"{foreign_files[0]} is not {owner}'s", f"chown -R {owner}: {path}")


def check_disk(folder: DataFolder) -> Iterator[Finding]:
    """There is room for a release."""
    machine = machine_figures(folder.path)
    if machine.disk_free_bytes is None or machine.disk_bytes is None:
        return
    inodes = os.statvfs(folder.path)
    free = f"{_mb(machine.disk_free_bytes)} of {_mb(machine.disk_bytes)} free"
    summary = f"{free}; releases here take {_mb(bytes_on_disk((folder.releases, folder.chunks)))}"
    if machine.disk_free_bytes < RESERVE_BYTES or (inodes.f_files and not inodes.f_favail):
        yield bad("disk", summary, "free some space: nothing new can be fetched or stored")
    elif machine.disk_free_bytes < LITTLE_DISK_BYTES:
        yield warning("disk", summary, "free some space, or run the agent with a smaller --store-quota")
    else:
        yield good("disk", summary)


def check_memory() -> Iterator[Finding]:
    """There is enough free memory."""
    machine = machine_figures(Path("/"))
    if machine.memory_free_bytes is None or machine.memory_bytes is None:
        return
    summary = f"{_mb(machine.memory_free_bytes)} of {_mb(machine.memory_bytes)} free"
    if machine.memory_free_bytes < LITTLE_MEMORY_BYTES:
        yield warning("memory", summary, "end other programs, or deploy with less on the device (--max-memory)")
    else:
        yield good("memory", summary)


def check_power(sysfs: Path) -> Iterator[Finding]:
    """The voltage is high enough, and the processor not too hot."""
    readings = read(sysfs)
    if readings.under_voltage:
        yield bad(
            "power",
            "the supply's voltage is too low now",
            "use the power supply that the board requires, and a short cable",
        )
    elif readings.under_voltage_since_boot:
        yield warning(
            "power", "the supply's voltage was too low since boot", "use the power supply that the board requires"
        )
    elif readings.under_voltage is not None:
        yield good("power", "voltage was never too low since boot")
    if readings.celsius is not None:
        summary = f"{readings.celsius:.0f} degrees"
        slowed = readings.hot or (
            readings.clock_ratio is not None and readings.clock_ratio < 0.95 and readings.celsius > WARM_CELSIUS
        )
        if slowed:
            yield warning(
                "heat", f"{summary}: the processor is slowed down", "cool it: a heat sink, a fan, room around it"
            )
        else:
            yield good("heat", summary)


def check_runtimes() -> Iterator[Finding]:
    """An engine for models is installed; none is loaded to find out."""
    versions = installed_versions(name for module, name in ENGINES.items() if importlib.util.find_spec(module))
    if versions:
        yield good("runtimes", ", ".join(f"{name} {version}" for name, version in versions.items()))
    else:
        yield bad("runtimes", "no engine for models is installed", "install edgesplit[agent], or install the kit again")
    yield from check_edge_tpu()


def check_confinement() -> Iterator[Finding]:
    """What the kernel takes from the processes that run models."""
    missing = [item for item in unavailable() if item.what == "network"]
    if not missing:
        yield good("model processes", "without network and new privileges; they can write no file")
    for item in missing:
        yield warning("model processes", f"they keep the {item.what}: {item.reason}", item.remedy)


def check_service() -> Iterator[Finding]:
    """The state of the agent's systemd service, where systemd runs and has the unit."""
    if not Path("/run/systemd/system").is_dir():
        return
    wanted = ("LoadState", "ActiveState", "SubState", "NRestarts", "UnitFileState", "StatusText")
    try:
        completed = subprocess.run(
            ["systemctl", "show", NAME, f"--property={','.join(wanted)}"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    unit = dict(line.split("=", 1) for line in completed.stdout.splitlines() if "=" in line)
    if unit.get("LoadState") != "loaded":
        return
    summary = f"{unit.get('ActiveState')} ({unit.get('SubState')}), restarted {unit.get('NRestarts', '0')} times"
    if unit.get("ActiveState") != "active":
        yield bad("service", summary, f"journalctl -u {NAME} -n 50 says why; systemctl restart {NAME}")
    elif unit.get("UnitFileState") not in ("enabled", "enabled-runtime"):
        yield warning("service", f"{summary}, and does not start at boot", f"systemctl enable {NAME}")
    else:
        yield good("service", f"{summary}; {unit.get('StatusText', '')}")


def check_versions(folder: DataFolder) -> Iterator[Finding]:
    """The version that the next start takes is undamaged on disk, and none has failed."""
    store = VersionStore(folder.path)
    state = store.read()
    if not state.running:
        yield good("version", f"{edgesplit.__version__}, as it was installed")
    elif trouble := store.damage(state.running):
        yield warning("version", f"release {state.running[:12]}: {trouble}", "none needed: the next start replaces it")
    else:
        how = "on trial" if state.trial else "found healthy"
        yield good("version", f"release {state.running[:12]} of the agent, {how}")
    for release, why in sorted({**state.rejected, **state.refused}.items()):
        yield warning("version", f"release {release[:12]} does not run here: {why}", DEPLOY_AGAIN)


def check_agent(folder: DataFolder) -> Iterator[Finding]:
    """Whether an agent runs on the folder, and its status."""
    if not _is_locked(folder):
        yield warning("agent", "no agent runs on this folder", f"systemctl start {NAME}, or edgesplit-agent supervise")
        return
    address = _read_address(folder)
    if address is None:
        yield warning("agent", "an agent runs and does not serve yet", "it enrols or loads models: see its log")
        return
    try:
        status = read_status(address.url)
    except LinkError as error:
        yield bad("agent", f"process {address.pid} {error}", f"systemctl restart {NAME}")
        return
    models = ", ".join(str(model.get("version")) for model in status.get("models", ())) or "no model"
    safe, broker = status.get("safe_mode"), status.get("broker", {})
    if safe:
        yield bad("agent", f"in safe mode: {safe}", "deploy a release that loads: the newest crashed the agent")
    elif status.get("statement_problem"):
        yield warning(
            "agent", f"{models}; {status['statement_problem']}", "what is named there; the agent retries by itself"
        )
    else:
        yield good("agent", f"process {address.pid} serves {models} at {address.url}")
    if not broker.get("connected"):
        yield warning(
            "session",
            f"no session with the broker: {broker.get('problem')}",
            "see broker above; the device goes on alone",
        )


def _read_address(folder: DataFolder) -> AgentAddress | None:
    try:
        return msgspec.json.decode((folder.path / "agent.json").read_bytes(), type=AgentAddress)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_locked(folder: DataFolder) -> bool:
    try:
        descriptor = os.open(folder.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _open_to_others(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
