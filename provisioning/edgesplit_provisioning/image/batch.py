"""Batches of cards from a CSV table, with a journal of those that are finished.

The table has a heading line. The journal lies beside it and gets one synced line for each finished card, so that an
interrupted batch resumes where it stopped.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from edgesplit import identifiers
from edgesplit.errors import UsageError
from edgesplit_provisioning.image.options import DeviceSettings, checked_hostname

COLUMNS = ("hostname", "group", "labels")
MAX_BYTES = 4 << 20


def read_rows(file: Path) -> list[DeviceSettings]:
    """Every device of the table; UsageError names the line that is invalid."""
    try:
        raw = file.read_bytes()[: MAX_BYTES + 1]
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{file} has more than {MAX_BYTES} bytes: split it")
    try:
        return list(_parse_rows(text, file))
    except csv.Error as error:
        raise UsageError(f"{file} is not a valid CSV file: {error}") from error


def _parse_rows(text: str, file: Path) -> Iterator[DeviceSettings]:
    reader = csv.DictReader(io.StringIO(text), restkey="", skipinitialspace=True)
    columns = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = columns
    if "hostname" not in columns or set(columns) - set(COLUMNS):
        raise UsageError(f"{file}: its first line names the columns, hostname among them: {','.join(COLUMNS)}")
    line_numbers: dict[str, int] = {}
    for row in reader:
        number = reader.line_num
        if not any(row.values()):
            continue
        line = _parse_row(number, row, file)
        if line.hostname in line_numbers:
            raise UsageError(f"{file}, line {number}: {line.hostname} is in line {line_numbers[line.hostname]} already")
        line_numbers[line.hostname] = number
        yield line
    if not line_numbers:
        raise UsageError(f"{file} lists no device")


def _parse_row(number: int, row: Mapping[str, str], file: Path) -> DeviceSettings:
    try:
        if "" in row:
            raise UsageError("more fields than the first line names")
        name = identifiers.new_device_name(checked_hostname((row.get("hostname") or "").strip()))
        pairs = [pair.strip() for pair in (row.get("labels") or "").split(";") if pair.strip()]
        labels = dict(identifiers.parse_label(pair) for pair in pairs)
        return DeviceSettings(hostname=name, group=(row.get("group") or "").strip() or None, labels=labels)
    except UsageError as error:
        raise UsageError(f"{file}, line {number}: {error}") from error


class Journal:
    """The devices of a table whose cards are finished."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.done = self._read()

    @classmethod
    def beside(cls, table: Path) -> Journal:
        """The journal of that table."""
        return cls(table.with_name(table.name + ".journal"))

    def add(self, hostname: str, instance: str, target: str) -> None:
        """Record a finished card; the line is synced to disk on return. It starts with a newline, so that a truncated
        line before it cannot swallow it."""
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
        """Names of finished devices. A truncated line is ignored: its card is written again."""
        try:
            lines = self.file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise UsageError(f"cannot read {self.file}: {error.strerror}") from error
        return {name for line in lines if (name := _hostname_in(line))}


def _hostname_in(line: bytes) -> str:
    try:
        name = json.loads(line)["hostname"]
    except (ValueError, TypeError, KeyError):
        return ""
    return name if isinstance(name, str) else ""
