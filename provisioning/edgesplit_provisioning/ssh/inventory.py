"""The machines to adopt, as given on the command line or in a CSV file with one machine per line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.identifiers import new_device_name, parse_label

COLUMNS = ("host", "name", "device_class", "group", "labels", "link", "port", "key")
MAX_HOSTS = 1_000
_TARGET = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9._$-]{0,63})@)?([A-Za-z0-9_\[][A-Za-z0-9._:%\[\]-]{0,252})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine as ssh reaches it, and the settings of its device. Empty fields are detected or left to ssh."""

    target: str
    """`[user@]host`, safe as an argument of ssh."""
    port: int | None = None
    key: str = ""
    """Path of a private key."""
    name: str = ""
    device_class: str = ""
    group: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    link: str = ""


def parse_host(text: str) -> Host:
    """Parse `[user@]host`; UsageError for anything that ssh could take for an option."""
    if not _TARGET.fullmatch(text):
        raise UsageError(f"not a machine: {text[:80]!r} (write it as user@host; its port with -p)")
    return Host(target=text)


def read_batch(path: Path) -> list[Host]:
    """Read the machines of a CSV file whose first line names its columns (`COLUMNS`; only `host` is required)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    rows = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
    try:
        unknown = set(rows.fieldnames or ()) - set(COLUMNS)
        if "host" not in (rows.fieldnames or ()) or unknown:
            raise UsageError(f"{path}: its first line must name columns of {', '.join(COLUMNS)}, `host` among them")
        hosts = [_parse_row(row, f"{path}, line {rows.line_num}") for row in rows]
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: {error}") from error
    if not 0 < len(hosts) <= MAX_HOSTS:
        raise UsageError(f"{path}: {len(hosts)} machines, 1 to {MAX_HOSTS}")
    return hosts


def _parse_row(row: Mapping[str, str | list[str] | None], where: str) -> Host:
    if None in row or None in row.values():
        raise UsageError(f"{where}: another number of fields than the first line has")
    values = {name: str(value).strip() for name, value in row.items()}
    try:
        host = parse_host(values["host"])
        labels = dict(parse_label(label) for label in values.get("labels", "").split() if label)
        port = _parse_port(values.get("port", ""))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return replace(
        host, name=values.get("name", ""), device_class=values.get("device_class", ""), group=values.get("group", ""),
        labels=labels, link=values.get("link", ""), port=port, key=values.get("key", ""),
    )  # fmt: skip


def _parse_port(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:6]) < 65_536:
        raise UsageError(f"not a port: {text[:20]!r}")
    return int(text)


def check_distinct(hosts: Sequence[Host]) -> None:
    """UsageError where a machine or a name occurs twice, or a name is invalid."""
    _check_unique("machine", [f"{host.target} port {host.port}" if host.port else host.target for host in hosts])
    _check_unique("name", [new_device_name(host.name) for host in hosts if host.name])


def _check_unique(kind: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UsageError(f"the same {kind} twice: {value}")


def proposed_name(host_name: str) -> str:
    """A device name derived from a machine's host name; UsageError where nothing valid is left."""
    short = re.sub(r"[^a-z0-9]+", "-", host_name.partition(".")[0].lower()).strip("-")[:63].strip("-")
    try:
        return new_device_name(short)
    except UsageError as error:
        raise UsageError(f"the machine calls itself {host_name[:60]!r}, which names no device: give --name") from error
