"""What a doctor sees on the device itself: its folder, room, memory, power, engines, service."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib.util
import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edgesplit_agent.host.machine import board
from edgesplit_agent.power.sensors import read
from edgesplit_agent.releases.disk_quota import RESERVE_BYTES
from edgesplit_agent.service.doctor_edge_tpu import edge_tpu
from edgesplit_agent.service.doctor_findings import Finding, bad, good, warning
from edgesplit_agent.service.systemd_unit import NAME
from edgesplit_agent.serving.http_endpoint import STATUS_PATH
from edgesplit_agent.state.data_folder import DataFolder, Here

LITTLE_DISK_BYTES = 512 << 20
LITTLE_MEMORY_BYTES = 150 << 20
WARM_CELSIUS = 80.0
ENGINES = {"onnxruntime": "onnxruntime", "ai_edge_litert": "ai-edge-litert", "tflite_runtime": "tflite-runtime"}
ANSWER_S = 5.0


def files(folder: DataFolder) -> Iterator[Finding]:
    """The data folder is there, its owner's alone, and can be written."""
    path = folder.path
    if not path.is_dir():
        yield bad("folder", f"there is no {path}", "install the agent (install.sh), or name its folder with --data")
        return
    seen = path.stat()
    owner = _user(seen.st_uid)
    loose = [one for one in (folder.key_file, folder.encryption_key_file, folder.renewed_file) if _open_to_others(one)]
    if loose:
        yield bad("folder", f"others may read the private key {loose[0]}", f"chmod 600 {loose[0]}")
    elif seen.st_mode & 0o007:
        yield warning("folder", f"others may look into {path}", f"chmod 700 {path}")
    elif not os.access(path, os.W_OK):
        yield bad("folder", f"{path} belongs to {owner} and cannot be written by us", f"run as {owner}, or as root")
    else:
        yield good("folder", f"{path} of {owner}")
    strangers = [one for one in sorted(path.iterdir()) if one.lstat().st_uid != seen.st_uid]
    if strangers:
        yield bad("owner", f"{strangers[0]} is not {owner}'s", f"chown -R {owner}: {path}")


def disk(folder: DataFolder) -> Iterator[Finding]:
    """There is room for a release."""
    seen = board(folder.path)
    if seen.disk_free_bytes is None or seen.disk_bytes is None:
        return
    inodes = os.statvfs(folder.path)
    said = f"{_mb(seen.disk_free_bytes)} of {_mb(seen.disk_bytes)} free; releases here take {_mb(_held(folder))}"
    if seen.disk_free_bytes < RESERVE_BYTES or (inodes.f_files and not inodes.f_favail):
        yield bad("disk", said, "free some: nothing new can be fetched or kept")
    elif seen.disk_free_bytes < LITTLE_DISK_BYTES:
        yield warning("disk", said, "free some, or run the agent with a smaller --store-quota")
    else:
        yield good("disk", said)


def memory() -> Iterator[Finding]:
    """There is memory to run in."""
    seen = board(Path("/"))
    if seen.memory_free_bytes is None or seen.memory_bytes is None:
        return
    said = f"{_mb(seen.memory_free_bytes)} of {_mb(seen.memory_bytes)} free"
    if seen.memory_free_bytes < LITTLE_MEMORY_BYTES:
        yield warning("memory", said, "end other programs, or deploy with less on the device (--max-memory)")
    else:
        yield good("memory", said)


def power(sysfs: Path) -> Iterator[Finding]:
    """Enough voltage, and not too hot."""
    seen = read(sysfs)
    if seen.under_voltage:
        yield bad(
            "power", "the supply's voltage is too low now", "use the supply that the board asks for, a short cable"
        )
    elif seen.under_voltage_since_boot:
        yield warning("power", "the supply's voltage was too low since boot", "use the supply that the board asks for")
    elif seen.under_voltage is not None:
        yield good("power", "voltage was never too low since boot")
    if seen.celsius is not None:
        said = f"{seen.celsius:.0f} degrees"
        slowed = seen.hot or (seen.speed is not None and seen.speed < 0.95 and seen.celsius > WARM_CELSIUS)
        if slowed:
            yield warning(
                "heat", f"{said}: the processor is slowed down", "cool it: a heat sink, a fan, room around it"
            )
        else:
            yield good("heat", said)


def runtimes() -> Iterator[Finding]:
    """What can run models here; no engine is loaded to find out."""
    found = []
    for module, name in ENGINES.items():
        if importlib.util.find_spec(module) is not None:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.append(f"{name} {metadata.version(name)}")
    if found:
        yield good("runtimes", ", ".join(found))
    else:
        yield bad("runtimes", "no engine for models is installed", "install edgesplit[agent], or the kit anew")
    yield from edge_tpu()


def system_service() -> Iterator[Finding]:
    """What systemd says of the agent, where it runs and knows it."""
    if not Path("/run/systemd/system").is_dir():
        return
    wanted = ("LoadState", "ActiveState", "SubState", "NRestarts", "UnitFileState", "StatusText")
    try:
        done = subprocess.run(
            ["systemctl", "show", NAME, f"--property={','.join(wanted)}"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if told.get("LoadState") != "loaded":
        return
    said = f"{told.get('ActiveState')} ({told.get('SubState')}), started again {told.get('NRestarts', '0')} times"
    if told.get("ActiveState") != "active":
        yield bad("service", said, f"journalctl -u {NAME} -n 50 says why; systemctl restart {NAME}")
    elif told.get("UnitFileState") not in ("enabled", "enabled-runtime"):
        yield warning("service", f"{said}, and does not start at boot", f"systemctl enable {NAME}")
    else:
        yield good("service", f"{said}; {told.get('StatusText', '')}")


def agent_state(folder: DataFolder) -> Iterator[Finding]:
    """Whether an agent runs on the folder, and what it says of itself."""
    if not _held_by_somebody(folder):
        yield warning("agent", "no agent runs on this folder", f"systemctl start {NAME}, or edgesplit-agent supervise")
        return
    here = _here(folder)
    if here is None:
        yield warning("agent", "an agent runs and serves nobody yet", "it enrols or loads models: see its log")
        return
    try:
        told = _ask(here.url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        yield bad("agent", f"process {here.pid} does not answer at {here.url}: {error}", f"systemctl restart {NAME}")
        return
    models = ", ".join(str(one.get("version")) for one in told.get("models", ())) or "no model"
    safe, broker = told.get("safe_mode"), told.get("broker", {})
    if safe:
        yield bad(
            "agent", f"in safe mode: {safe}", "deploy a release that loads: the newest ended the agent when it did"
        )
    elif told.get("trouble"):
        yield warning("agent", f"{models}; {told['trouble']}", "what is named there; it tries again by itself")
    else:
        yield good("agent", f"process {here.pid} serves {models} at {here.url}")
    if not broker.get("connected"):
        yield warning(
            "session", f"no session with the broker: {broker.get('problem')}", "see broker above; it goes on alone"
        )


def _here(folder: DataFolder) -> Here | None:
    try:
        return msgspec.json.decode((folder.path / "agent.json").read_bytes(), type=Here)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _ask(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", STATUS_PATH)
        told = json.loads(connection.getresponse().read(1 << 20))
    finally:
        connection.close()
    if not isinstance(told, dict):
        raise ValueError("what it says is no status")
    return told


def _held_by_somebody(folder: DataFolder) -> bool:
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


def _held(folder: DataFolder) -> int:
    total = 0
    for place in (folder.releases, folder.chunks):
        for where, _, names in os.walk(place):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


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
