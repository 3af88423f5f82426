"""Builds edgesplit's own wheel for devices: only the packages that run there; reproducible.

Its version (`0.2.0+device`) and metadata reflect this: extras of packages that are not in it are not offered. The
sources are the packages as imported here: in a checkout as they are on disk; in an installed wheel only the files of
its RECORD, each checked against its digest.
"""

from __future__ import annotations

import base64
import email.message
import hashlib
import importlib.util
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import edgesplit
from edgesplit.errors import TrustError, UsageError

PACKAGES = ("edgesplit", "edgesplit_agent", "edgesplit_offload")
"""Import packages that the wheel contains."""
EXTRAS = ("agent", "offload", "tflite", "otel")
"""Extras that the wheel offers."""
COMMAND = "edgesplit-agent"
FIXED_TIME = (1980, 1, 1, 0, 0, 0)
"""Time stamp of every file in the wheel, for reproducibility."""


def version() -> str:
    """Version of the wheel."""
    return f"{edgesplit.__version__}+device"


def file_name() -> str:
    """File name of the wheel."""
    return f"edgesplit-{version()}-py3-none-any.whl"


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Requirements of the wheel with these extras; markers that depend on an extra are evaluated. UsageError for an
    unknown extra."""
    unknown = sorted(set(extras) - set(EXTRAS))
    if unknown:
        raise UsageError(f"no extra {', '.join(unknown)} on devices; there are {', '.join(EXTRAS)}")
    selected = []
    for text in _distribution().metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.name == "edgesplit":
            continue
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            requirement.marker = None
            selected.append(str(requirement))
    return sorted(set(selected))


def write(folder: Path) -> Path:
    """Write the wheel into `folder`; returns its path."""
    info = f"edgesplit-{version()}.dist-info"
    files = dict(_sources())
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: edgesplit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = _entry_points().encode()
    record = f"{info}/RECORD"
    files[record] = "".join(
        [*(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in sorted(files.items())), f"{record},,\n"]
    ).encode()
    output = folder / file_name()
    with zipfile.ZipFile(
        output, "w", zipfile.ZIP_STORED
    ) as archive:  # uncompressed: the bytes must not depend on the version of zlib
        for name, data in sorted(files.items(), key=lambda item: (item[0] == record, item[0])):
            entry = zipfile.ZipInfo(name, FIXED_TIME)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3
            archive.writestr(entry, data)
    return output


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("edgesplit")
    except metadata.PackageNotFoundError as error:
        raise UsageError("edgesplit is not installed here: pip install 'edgesplit[cli]' (or -e '.[cli]')") from error


def _sources() -> Iterator[tuple[str, bytes]]:
    """Name in the wheel and content of each source file. TrustError where an installed file differs from its RECORD."""
    recorded = _recorded()
    for room in PACKAGES:
        spec = importlib.util.find_spec(room)
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"{room} is not installed here: pip install 'edgesplit[cli]'")
        folder = Path(next(iter(spec.submodule_search_locations)))
        for file in sorted(folder.rglob("*")):
            name = f"{room}/{file.relative_to(folder).as_posix()}"
            if not file.is_file() or "__pycache__" in name or any(part.startswith(".") for part in name.split("/")):
                continue
            data = file.read_bytes()
            if recorded is not None:
                if name not in recorded:
                    continue
                if recorded[name] != _digest(data):
                    raise TrustError(f"{file} is not what was installed: install edgesplit again")
            yield name, data


def _recorded() -> dict[str, str] | None:
    """Digests in the installed wheel's RECORD, by file; None where edgesplit runs from a checkout."""
    digests = {
        file.as_posix(): file.hash.value
        for file in _distribution().files or ()
        if file.hash is not None and file.hash.mode == "sha256" and file.parts[0] in PACKAGES
    }
    return digests or None


def _metadata() -> str:
    installed = _distribution().metadata
    headers = email.message.Message()
    headers["Metadata-Version"] = "2.1"
    headers["Name"] = "edgesplit"
    headers["Version"] = version()
    headers["Summary"] = f"The device's part of edgesplit: {', '.join(PACKAGES)}."
    headers["Requires-Python"] = str(installed["Requires-Python"])
    for extra in EXTRAS:
        headers["Provides-Extra"] = extra
    for text in installed.get_all("Requires-Dist") or ():
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            headers["Requires-Dist"] = text
    return "".join(f"{key}: {value}\n" for key, value in headers.items())


def _entry_points() -> str:
    command = next(entry_point for entry_point in _distribution().entry_points if entry_point.name == COMMAND)
    return f"[console_scripts]\n{command.name} = {command.value}\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
