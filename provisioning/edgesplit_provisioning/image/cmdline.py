"""The kernel command line on a boot partition: one line, the only line that the firmware reads. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from edgesplit.errors import UsageError

NAME = "cmdline.txt"
MAX_BYTES = 2_000
"""Longest line that is written: an arm64 kernel takes 2,048 bytes, and the firmware adds parameters of its own."""


def parameters(raw: bytes) -> list[str]:
    """The parameters of the line; UsageError for a file that is not one line of ASCII."""
    try:
        lines = [line.strip() for line in raw.replace(b"\0", b"").decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise UsageError(f"{NAME} of the image is not text: {error.reason}") from error
    lines = [line for line in lines if line]
    if len(lines) != 1:
        raise UsageError(f"{NAME} of the image has {len(lines)} lines and should have one")
    return _split(lines[0])


def with_parameters(raw: bytes, wanted: Sequence[str]) -> bytes:
    """The line with these parameters appended, each replacing an earlier one of the same name. UsageError where it
    grows too long."""
    replaced = {parameter.partition("=")[0] for parameter in wanted}
    kept = [parameter for parameter in parameters(raw) if parameter.partition("=")[0] not in replaced]
    line = " ".join([*kept, *wanted])
    if len(line) > MAX_BYTES:
        raise UsageError(f"{NAME} would have {len(line)} bytes, and a kernel reads {MAX_BYTES}")
    return line.encode("ascii") + b"\n"


def _split(line: str) -> list[str]:
    """Split at spaces outside double quotes."""
    parts, part, quoted = [], "", False
    for letter in line:
        quoted ^= letter == '"'
        if letter.isspace() and not quoted:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [parameter for parameter in (*parts, part) if parameter]
