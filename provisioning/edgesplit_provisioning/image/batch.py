"""Many cards from one table: which devices, and which of them are done.

The table is CSV with a heading. The journal lies beside it and gets a line, on disk, for each card that was finished:
a batch that was stopped goes on where it was.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgesplit import identifiers
from edgesplit.errors import UsageError
from edgesplit_provisioning.image import options

COLUMNS = ("hostname", "group", "labels")
MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One device to be."""

    number: int
    hostname: str
    group: str | None
    labels: Mapping[str, str]


def read_lines(file: Path) -> list[Line]:
    """Every device of the table; UsageError names the line that cannot be."""
    try:
        raw = file.read_bytes()[: MOST_BYTES + 1]
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no text in UTF-8") from error
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{file} has more than {MOST_BYTES} bytes: split it")
    try:
        return list(_lines(text, file))
    except csv.Error as error:
        raise UsageError(f"{file} is no CSV: {error}") from error


def _lines(text: str, file: Path) -> Iterator[Line]:
    reader = csv.DictReader(io.StringIO(text), restkey="", skipinitialspace=True)
    columns = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = columns
    if "hostname" not in columns or set(columns) - set(COLUMNS):
        raise UsageError(f"{file}: its first line names the columns, hostname among them: {','.join(COLUMNS)}")
    seen: dict[str, int] = {}
    for row in reader:
        number = reader.line_num
        if not any(row.values()):
            continue
        line = _line(number, row, file)
        if line.hostname in seen:
            raise UsageError(f"{file}, line {number}: {line.hostname} is in line {seen[line.hostname]} already")
        seen[line.hostname] = number
        yield line
    if not seen:
        raise UsageError(f"{file} lists no device")


def _line(number: int, row: Mapping[str, str], file: Path) -> Line:
    try:
        if "" in row:
            raise UsageError("more fields than the first line names")
        name = identifiers.device_name(options.hostname((row.get("hostname") or "").strip()))
        pairs = [one.strip() for one in (row.get("labels") or "").split(";") if one.strip()]
        return Line(number, name, (row.get("group") or "").strip() or None, dict(label(one) for one in pairs))
    except UsageError as error:
        raise UsageError(f"{file}, line {number}: {error}") from error


def label(text: str) -> tuple[str, str]:
    """Key and value of K=V."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"label {text[:60]!r}: write it as KEY=VALUE, as in room=kitchen")
    return key, value


class Journal:
    """Which devices of a table have their card."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.done = self._read()

    @classmethod
    def beside(cls, table: Path) -> Journal:
        """The journal of that table."""
        return cls(table.with_name(table.name + ".journal"))

    def add(self, hostname: str, instance: str, target: str) -> None:
        """That card is finished; it is on disk when this returns, on a line that nothing cut off goes before."""
        entry = "\n" + json.dumps({"hostname": hostname, "instance": instance, "target": target}) + "\n"
        try:
            with self.file.open("ab") as opened:
                opened.write(entry.encode())
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise UsageError(f"cannot note in {self.file} that {hostname} is done: {error.strerror}") from error
        self.done.add(hostname)

    def _read(self) -> set[str]:
        """A line that was cut off counts for nothing: its card is written again."""
        try:
            lines = self.file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise UsageError(f"cannot read {self.file}: {error.strerror}") from error
        return {name for line in lines if (name := _noted(line))}


def _noted(line: bytes) -> str:
    try:
        name = json.loads(line)["hostname"]
    except (ValueError, TypeError, KeyError):
        return ""
    return name if isinstance(name, str) else ""
