"""Parser of os-release(5), the file that names an operating system and its version."""

from __future__ import annotations

import re


def parse_os_release(raw: bytes) -> dict[str, str]:
    """The fields of an os-release file, read without a shell: lines of KEY=VALUE, the value possibly quoted. Of two
    equal keys the first counts."""
    fields: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        matched = re.fullmatch(r"([A-Z][A-Z0-9_]{0,40})=(.{0,300})", line.strip())
        if matched is None:
            continue
        value = matched[2]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = re.sub(r'\\(["\'$`\\])', r"\1", value[1:-1])
        fields.setdefault(matched[1], value)
    return fields
