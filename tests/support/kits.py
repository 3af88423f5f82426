"""Wheels and kits for tests, without network: made up, or repacked from what is installed here."""

from __future__ import annotations

import base64
import hashlib
import platform
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from edgesplit_provisioning.kit import manifest
from edgesplit_provisioning.kit.manifest import KitManifest, encode, list_files

INSTALL = Path(manifest.__file__).with_name("install.sh")
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
MACHINE = platform.machine()
AGENT = """
import sys

def main():
    if "--version" in sys.argv:
        print("edgesplit-agent VERSION")
    elif "unit" in sys.argv:
        print("[Service]\\nExecStart=" + " ".join(sys.argv[1:]))
"""


def made_up_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    command: str = "",
    tag: str = "py3-none-any",
) -> Path:
    """A wheel with nothing in it but what is said."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    headers = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        *(f"Requires-Dist: {r}\n" for r in requires),
    ]
    content = {
        **(files or {f"{module}/__init__.py": ""}),
        f"{info}/METADATA": "".join(headers),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if command:
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{command}\n"
    return _written(folder / f"{module}-{version}-{tag}.whl", info, {name: t.encode() for name, t in content.items()})


def repacked(folder: Path, name: str) -> Path:
    """The wheel of a distribution that is installed here, of the files that it came with."""
    found = metadata.distribution(name)
    files = {
        file.as_posix(): Path(str(file.locate())).read_bytes()
        for file in found.files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts and not file.name.endswith((".pyc", "RECORD"))
    }
    info = next(one.split("/")[0] for one in files if one.endswith(".dist-info/METADATA"))
    files = {name: data for name, data in files.items() if Path(name).name not in ("INSTALLER", "REQUESTED")}
    tags = [line.split(": ")[1] for line in files[f"{info}/WHEEL"].decode().splitlines() if line.startswith("Tag: ")]
    interpreter, abi, _ = tags[0].split("-")
    platforms = ".".join(sorted({tag.split("-")[2] for tag in tags}))
    return _written(folder / f"{info.removesuffix('.dist-info')}-{interpreter}-{abi}-{platforms}.whl", info, files)


def _written(made: Path, info: str, files: Mapping[str, bytes]) -> Path:
    lines = []
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
        archive.writestr(f"{info}/RECORD", "".join([*lines, f"{info}/RECORD,,\n"]))
    return made


def made_up_agent(folder: Path, version: str) -> Path:
    """A wheel whose command says its version and prints a unit, and nothing else."""
    return made_up_wheel(
        folder, "edgesplit", f"{version}+device", files={"made_up_agent.py": AGENT.replace("VERSION", version)},
        command="edgesplit-agent = made_up_agent:main",
    )  # fmt: skip


def small_kit(folder: Path, pip_wheel: Path, version: str = "1.0.0", **other: str) -> Path:
    """A kit for this machine that installs in a second: a made-up agent, and pip to install it with."""
    folder.mkdir(parents=True)
    wheels = [made_up_agent(folder, version), pip_wheel]
    with tarfile.open(folder / "wheels.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for wheel in wheels:
            archive.add(wheel, wheel.name)
    wheels[0].unlink()
    (folder / "install.sh").write_bytes(INSTALL.read_bytes())
    describe(folder, version, **other)
    return folder


def describe(folder: Path, version: str, **other: str) -> None:
    """Write the folder's kit.json anew."""
    fields = {"python": HERE, "machine": MACHINE, "glibc": "2.17", **other}
    files = {one.name: one for one in folder.iterdir() if one.name not in ("kit.json", "claim.json")}
    described = KitManifest(
        format="edgesplit.kit/1", version=version, extras=("agent",), needs_bytes=1 << 20, wheels=(),
        files=list_files(files), **fields,
    )  # fmt: skip
    (folder / "kit.json").write_bytes(encode(described))
