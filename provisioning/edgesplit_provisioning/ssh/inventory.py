"""Which machines to adopt, as whom, and as what: from the command line, or a CSV file with one machine per line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.identifiers import device_name

COLUMNS = ("host", "name", "device_class", "group", "labels", "link", "port", "key")
MOST_HOSTS = 1_000
_TARGET = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9._$-]{0,63})@)?([A-Za-z0-9_\[][A-Za-z0-9._:%\[\]-]{0,252})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine, as ssh reaches it, and what it shall be called. Empty: found out there, or left to ssh."""

    target: str
    """`[user@]host`, safe as an argument of ssh."""
    port: int | None = None
    key: str = ""
    """A private key's file."""
    name: str = ""
    device_class: str = ""
    group: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    link: str = ""


def parse_host(text: str) -> Host:
    """`[user@]host`; UsageError for what ssh could take for anything else, as an option."""
    if not _TARGET.fullmatch(text):
        raise UsageError(f"not a machine: {text[:80]!r} (write it as user@host; its port with -p)")
    return Host(target=text)


def parse_label(text: str) -> tuple[str, str]:
    """`KEY=VALUE`; UsageError for anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"label {text[:60]!r}: write it as KEY=VALUE, as in room=kitchen")
    return key, value


def read_batch(path: Path) -> list[Host]:
    """The machines in a CSV file whose first line names its columns (`COLUMNS`; only `host` is a must)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    rows = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
    try:
        unknown = set(rows.fieldnames or ()) - set(COLUMNS)
        if "host" not in (rows.fieldnames or ()) or unknown:
            raise UsageError(f"{path}: its first line must name columns of {', '.join(COLUMNS)}, `host` among them")
        found = [_of_row(row, f"{path}, line {rows.line_num}") for row in rows]
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: {error}") from error
    if not 0 < len(found) <= MOST_HOSTS:
        raise UsageError(f"{path}: {len(found)} machines, 1 to {MOST_HOSTS}")
    return found


def _of_row(row: Mapping[str, str | list[str] | None], where: str) -> Host:
    if None in row or None in row.values():
        raise UsageError(f"{where}: another number of fields than the first line has")
    told = {name: str(value).strip() for name, value in row.items()}
    try:
        host = parse_host(told["host"])
        labels = dict(parse_label(one) for one in told.get("labels", "").split() if one)
        port = _port(told.get("port", ""))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return replace(
        host, name=told.get("name", ""), device_class=told.get("device_class", ""), group=told.get("group", ""),
        labels=labels, link=told.get("link", ""), port=port, key=told.get("key", ""),
    )  # fmt: skip


def _port(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:6]) < 65_536:
        raise UsageError(f"not a port: {text[:20]!r}")
    return int(text)


def check_distinct(hosts: Sequence[Host]) -> None:
    """UsageError where one machine, or one name, is there twice; names are checked too."""
    _once("machine", [f"{host.target} port {host.port}" if host.port else host.target for host in hosts])
    _once("name", [device_name(host.name) for host in hosts if host.name])


def _once(what: str, every: Sequence[str]) -> None:
    for one in every:
        if every.count(one) > 1:
            raise UsageError(f"one {what} twice: {one}")


def proposed_name(said: str) -> str:
    """A device name made of what a machine calls itself; UsageError where nothing is left of that."""
    short = re.sub(r"[^a-z0-9]+", "-", said.partition(".")[0].lower()).strip("-")[:63].strip("-")
    try:
        return device_name(short)
    except UsageError as error:
        raise UsageError(f"the machine calls itself {said[:60]!r}, which names no device: give --name") from error
