"""edgesplit's own wheel for devices: the rooms that run there and no others, the same bytes from the same sources.

Its version says so (`0.1.0+device`), and so does its metadata: extras of rooms that are not in it are not offered.
Sources are the packages that are imported here: of a checkout as they lie there, of an installed wheel only what its
RECORD lists, each file checked against it.
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

ROOMS = ("edgesplit", "edgesplit_agent", "edgesplit_offload")
EXTRAS = ("agent", "offload", "tflite", "otel")
COMMAND = "edgesplit-agent"
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def version() -> str:
    """Of the wheel."""
    return f"{edgesplit.__version__}+device"


def file_name() -> str:
    """Of the wheel."""
    return f"edgesplit-{version()}-py3-none-any.whl"


def requirements(extras: tuple[str, ...]) -> list[str]:
    """What the wheel with these extras asks for, without conditions that do not hold for the extras."""
    unknown = sorted(set(extras) - set(EXTRAS))
    if unknown:
        raise UsageError(f"no extra {', '.join(unknown)} on devices; there are {', '.join(EXTRAS)}")
    found = []
    for text in _distribution().metadata.get_all("Requires-Dist") or ():
        one = Requirement(text)
        if one.name == "edgesplit":
            continue
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
            one.marker = None
            found.append(str(one))
    return sorted(set(found))


def write(folder: Path) -> Path:
    """The wheel, written into `folder`."""
    info = f"edgesplit-{version()}.dist-info"
    files = dict(_sources())
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: edgesplit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = _entry_points().encode()
    record = f"{info}/RECORD"
    files[record] = "".join(
        [*(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in sorted(files.items())), f"{record},,\n"]
    ).encode()
    made = folder / file_name()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:  # stored: no zlib's version shows in the bytes
        for name, data in sorted(files.items(), key=lambda item: (item[0] == record, item[0])):
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3
            archive.writestr(entry, data)
    return made


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("edgesplit")
    except metadata.PackageNotFoundError as error:
        raise UsageError("edgesplit is not installed here: pip install 'edgesplit[cli]' (or -e '.[cli]')") from error


def _sources() -> Iterator[tuple[str, bytes]]:
    """Each file of the rooms, named as in a wheel."""
    recorded = _recorded()
    for room in ROOMS:
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
    """What the installed wheel's RECORD says of the rooms' files; None where edgesplit runs from a checkout."""
    found = {
        file.as_posix(): file.hash.value
        for file in _distribution().files or ()
        if file.hash is not None and file.hash.mode == "sha256" and file.parts[0] in ROOMS
    }
    return found or None


def _metadata() -> str:
    whole = _distribution().metadata
    kept = email.message.Message()
    kept["Metadata-Version"] = "2.1"
    kept["Name"] = "edgesplit"
    kept["Version"] = version()
    kept["Summary"] = f"The device's part of edgesplit: {', '.join(ROOMS)}."
    kept["Requires-Python"] = str(whole["Requires-Python"])
    for extra in EXTRAS:
        kept["Provides-Extra"] = extra
    for text in whole.get_all("Requires-Dist") or ():
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            kept["Requires-Dist"] = text
    return "".join(f"{key}: {value}\n" for key, value in kept.items())


def _entry_points() -> str:
    command = next(one for one in _distribution().entry_points if one.name == COMMAND)
    return f"[console_scripts]\n{command.name} = {command.value}\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
