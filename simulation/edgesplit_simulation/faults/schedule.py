"""What goes wrong in a fleet, and when: a faults file (YAML), checked before anything begins.

    format: edgesplit.faults/1
    faults:
      - {what: offline, devices: 20%, rate: 0.5/d, for: 5m-6h}    # each of these devices, by chance, so often
      - {what: broker restart, at: 2d, for: 30s}                  # once, at that moment
      - {what: release, every: 1d, how: crash, devices: 10%}      # a new version; on so many devices it does so

A fault has a moment (`at`), a period (`every`) or a `rate` (of each device, or of the one broker or controller). `for`
is a span, or two of which one is drawn between. `docs/simulation.md` lists every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from edgesplit.errors import UsageError
from edgesplit_simulation import quantities

FORMAT = "edgesplit.faults/1"
MOST_BYTES = 1_000_000
What = Literal[
    "offline", "slow link", "power cut", "power cut while writing", "clock off", "full disk", "flipped bits",
    "copied card", "never answers", "revoked", "cloud gone", "broker restart", "controller kill", "restore", "release",
]  # fmt: skip
How = Literal["well", "golden", "crash", "slow", "leak", "drift", "hot", "hungry", "any"]
OF_DEVICES: frozenset[What] = frozenset({
    "offline", "slow link", "power cut", "power cut while writing", "clock off", "full disk", "flipped bits",
    "copied card", "never answers", "revoked",
})  # fmt: skip
LASTING: frozenset[What] = frozenset({
    "offline", "slow link", "power cut", "power cut while writing", "clock off", "full disk", "copied card",
    "never answers", "cloud gone", "broker restart", "controller kill", "restore",
})  # fmt: skip
"""Kinds that take a `for`."""
IN_REAL_TIME: frozenset[What] = frozenset({
    "offline", "power cut", "power cut while writing", "clock off", "full disk", "flipped bits", "copied card",
    "never answers", "cloud gone", "release",
})  # fmt: skip
"""What can be done to devices alone. A `release` is then how the next one that comes behaves."""


USUALLY_S = (60.0, 600.0)
"""How long a fault lasts that does not say it."""


class _Spelt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"lasts": "for"}):
    """One fault as it is written."""

    what: What
    devices: str = "100%"
    at: str = ""
    every: str = ""
    rate: str = ""
    lasts: str = ""
    by: str = ""
    """Of `clock off`: how far; of `slow link`: a rate as in 64kbit; of `restore`: how old the backup is."""
    how: How = "well"
    """Of `release`."""
    forget: bool = False
    """Of `broker restart`: nothing is retained any more."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["edgesplit.faults/1"]
    faults: tuple[_Spelt, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the file, in numbers."""

    what: What
    share: float = 1.0
    at_s: float | None = None
    every_s: float | None = None
    per_s: float | None = None
    lasts_s: tuple[float, float] = USUALLY_S
    by: str = ""
    how: How = "well"
    forget: bool = False


def read_faults(path: Path) -> tuple[Fault, ...]:
    """The faults in that file; UsageError says what is wrong with it, and where."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return parse_faults(raw, str(path))


def parse_faults(raw: bytes, name: str = "the faults file") -> tuple[Fault, ...]:
    """The same, of these bytes."""
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{name}: {len(raw)} bytes, at most {MOST_BYTES}")
    try:
        found: Any = yaml.safe_load(raw)
        file = msgspec.convert(found, _File)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"{name}: {str(error).splitlines()[0]} (docs/simulation.md says what a file has)") from error
    faults = []
    for number, one in enumerate(file.faults, 1):
        try:
            faults.append(_in_numbers(one))
        except UsageError as error:
            raise UsageError(f"{name}, fault {number} ({one.what}): {error}") from error
    return tuple(faults)


def _in_numbers(one: _Spelt) -> Fault:
    times = [name for name in ("at", "every", "rate") if getattr(one, name)]
    if len(times) != 1:
        raise UsageError("say once when: at (a moment), every (a period) or rate (so often, by chance)")
    if one.lasts and one.what not in LASTING:
        raise UsageError("it does not last: leave `for` away")
    if one.how != "well" and one.what != "release":
        raise UsageError("only a release has a `how`")
    if one.forget and one.what != "broker restart":
        raise UsageError("only a broker that restarts can forget")
    _check_by(one)
    return Fault(
        what=one.what,
        share=quantities.share(one.devices),
        at_s=quantities.span_s(one.at) if one.at else None,
        every_s=quantities.span_s(one.every) if one.every else None,
        per_s=quantities.per_s(one.rate) if one.rate else None,
        lasts_s=quantities.spans_s(one.lasts) if one.lasts else USUALLY_S,
        by=one.by,
        how=one.how,
        forget=one.forget,
    )


def _check_by(one: _Spelt) -> None:
    from edgesplit.links import parse_rate

    if one.by and one.what in ("clock off", "restore"):
        quantities.span_s(one.by.removeprefix("-"))
    elif one.by and one.what == "slow link":
        parse_rate(one.by)
    elif one.by:
        raise UsageError("only clock off, slow link and restore have a `by`")


USUAL = b"""
format: edgesplit.faults/1
faults:
  - {what: release, every: 1d, how: any, devices: 30%}
  - {what: offline, rate: 1/d, for: 5m-6h}
  - {what: slow link, rate: 0.3/d, for: 10m-3h, by: 64kbit}
  - {what: power cut, rate: 1/d, for: 10s-2h}
  - {what: power cut while writing, rate: 1/d, for: 10s-10m}
  - {what: clock off, rate: 0.1/d, for: 1h-12h, by: -3650d}
  - {what: full disk, rate: 0.2/d, for: 10m-6h}
  - {what: flipped bits, rate: 0.2/d}
  - {what: copied card, rate: 0.02/d, for: 10m-1h}
  - {what: never answers, rate: 0.1/d, for: 10m-4h}
  - {what: cloud gone, rate: 2/d, for: 1m-1h}
  - {what: broker restart, rate: 1/d, for: 1s-5m}
  - {what: broker restart, rate: 0.2/d, for: 1s-5m, forget: true}
  - {what: controller kill, rate: 1/d, for: 1s-20m}
  - {what: restore, rate: 0.1/d, for: 1m-10m, by: 1d}
  - {what: revoked, devices: 5%, rate: 0.02/d}
"""
"""A bad month: what `--faults usual` means."""
