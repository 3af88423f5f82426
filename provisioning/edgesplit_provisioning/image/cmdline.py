"""The kernel's command line on a boot partition: one line, of which the firmware reads nothing more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edgesplit.errors import UsageError

NAME = "cmdline.txt"
MOST_BYTES = 2_000
"""Of 2,048 that an arm64 kernel takes; the firmware adds its own."""


def parameters(raw: bytes) -> list[str]:
    """The line's parameters; UsageError for a file that is not one line of them."""
    try:
        lines = [line.strip() for line in raw.replace(b"\0", b"").decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise UsageError(f"{NAME} of the image is no text: {error.reason}") from error
    lines = [line for line in lines if line]
    if len(lines) != 1:
        raise UsageError(f"{NAME} of the image has {len(lines)} lines and should have one")
    return _split(lines[0])


def with_parameters(raw: bytes, wanted: Sequence[str]) -> bytes:
    """The same line with these at its end, each instead of what had its name before."""
    named = {one.partition("=")[0] for one in wanted}
    kept = [one for one in parameters(raw) if one.partition("=")[0] not in named]
    line = " ".join([*kept, *wanted])
    if len(line) > MOST_BYTES:
        raise UsageError(f"{NAME} would have {len(line)} bytes, and a kernel reads {MOST_BYTES}")
    return line.encode("ascii") + b"\n"


def _split(line: str) -> list[str]:
    """By spaces, but not within double quotes."""
    parts, part, quoted = [], "", False
    for letter in line:
        quoted ^= letter == '"'
        if letter.isspace() and not quoted:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [one for one in (*parts, part) if one]
