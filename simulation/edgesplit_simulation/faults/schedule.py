"""The faults file (YAML): which faults a simulated fleet meets, and when; validated before the run begins.

    format: edgesplit.faults/1
    faults:
      - {what: offline, devices: 20%, rate: 0.5/d, for: 5m-6h}    # random, at this mean rate on each of these devices
      - {what: broker restart, at: 2d, for: 30s}                  # once, at that time
      - {what: release, every: 1d, how: crash, devices: 10%}      # a new version that crashes on 10% of the devices

A fault has a time (`at`), a period (`every`) or a `rate` (of each device, or of the single broker or controller). `for`
is a duration, or a range of which a duration is drawn. `docs/simulation.md` lists every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from edgesplit.errors import UsageError
from edgesplit.quantities import ABOVE_ZERO, parse_duration, parse_frequency, parse_percentage, parse_rate

FORMAT = "edgesplit.faults/1"
MAX_BYTES = 1_000_000
FaultKind = Literal[
    "offline", "slow link", "power cut", "power cut while writing", "clock off", "full disk", "flipped bits",
    "copied card", "never answers", "revoked", "cloud gone", "broker restart", "controller kill", "restore", "release",
]  # fmt: skip
BehaviourName = Literal["well", "golden", "crash", "slow", "leak", "drift", "hot", "hungry", "any"]
DEVICE_FAULTS: frozenset[FaultKind] = frozenset({
    "offline", "slow link", "power cut", "power cut while writing", "clock off", "full disk", "flipped bits",
    "copied card", "never answers", "revoked",
})  # fmt: skip
"""Kinds of fault that affect single devices."""
LASTING_FAULTS: frozenset[FaultKind] = frozenset({
    "offline", "slow link", "power cut", "power cut while writing", "clock off", "full disk", "copied card",
    "never answers", "cloud gone", "broker restart", "controller kill", "restore",
})  # fmt: skip
"""Kinds of fault that take a `for`."""
REAL_TIME_FAULTS: frozenset[FaultKind] = frozenset({
    "offline", "power cut", "power cut while writing", "clock off", "full disk", "flipped bits", "copied card",
    "never answers", "cloud gone", "release",
})  # fmt: skip
"""Kinds of fault that are possible at a real controller, since they affect devices only. `release` then sets how the
next release behaves."""


DEFAULT_DURATION_S = (60.0, 600.0)
"""Shortest and longest duration of a fault without `for`, in seconds."""


class _FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"lasts": "for"}):
    """One entry of the faults file, as written."""

    what: FaultKind
    devices: str = "100%"
    at: str = ""
    every: str = ""
    rate: str = ""
    lasts: str = ""
    by: str = ""
    """For `clock off`: the offset, as in -3650d; for `slow link`: a rate, as in 64kbit; for `restore`: the backup's
    age."""
    how: BehaviourName = "well"
    """For `release`: how it behaves."""
    forget: bool = False
    """For `broker restart`: retained messages are lost."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["edgesplit.faults/1"]
    faults: tuple[_FaultEntry, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the faults file, parsed: durations in seconds, shares as fractions."""

    kind: FaultKind
    share: float = 1.0
    at_s: float | None = None
    every_s: float | None = None
    rate_per_s: float | None = None
    duration_range_s: tuple[float, float] = DEFAULT_DURATION_S
    amount: str = ""
    behaviour: BehaviourName = "well"
    loses_retained: bool = False


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Parse the faults file at `path`; UsageError names the faulty entry and the reason."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return parse_faults(raw, str(path))


def parse_faults(raw: bytes, name: str = "the faults file") -> tuple[Fault, ...]:
    """Parse the bytes of a faults file; UsageError names the faulty entry and the reason."""
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{name}: {len(raw)} bytes, at most {MAX_BYTES}")
    try:
        document: Any = yaml.safe_load(raw)
        file = msgspec.convert(document, _File)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"{name}: {str(error).splitlines()[0]} (docs/simulation.md says what a file has)") from error
    faults = []
    for number, entry in enumerate(file.faults, 1):
        try:
            faults.append(_parse_entry(entry))
        except UsageError as error:
            raise UsageError(f"{name}, fault {number} ({entry.what}): {error}") from error
    return tuple(faults)


def _parse_entry(entry: _FaultEntry) -> Fault:
    times = [name for name in ("at", "every", "rate") if getattr(entry, name)]
    if len(times) != 1:
        raise UsageError("give exactly one of at (a time), every (a period) or rate (a mean frequency)")
    if entry.lasts and entry.what not in LASTING_FAULTS:
        raise UsageError("this kind of fault has no duration: omit `for`")
    if entry.how != "well" and entry.what != "release":
        raise UsageError("`how` applies to a release only")
    if entry.forget and entry.what != "broker restart":
        raise UsageError("`forget` applies to a broker restart only")
    _check_amount(entry)
    return Fault(
        kind=entry.what, share=parse_percentage(entry.devices, least=ABOVE_ZERO),
        at_s=parse_duration(entry.at) if entry.at else None,
        every_s=parse_duration(entry.every) if entry.every else None,
        rate_per_s=parse_frequency(entry.rate) if entry.rate else None,
        duration_range_s=_parse_duration_range(entry.lasts) if entry.lasts else DEFAULT_DURATION_S, amount=entry.by,
        behaviour=entry.how, loses_retained=entry.forget,
    )  # fmt: skip


def _parse_duration_range(text: str) -> tuple[float, float]:
    """Shortest and longest duration of a range such as `1m-10m`; a single duration such as `5m` gives it twice."""
    first, dash, last = text.partition("-")
    shortest = parse_duration(first)
    longest = parse_duration(last) if dash else shortest
    if longest < shortest:
        raise UsageError(f"{text[:40]!r} begins with the longer duration")
    return shortest, longest


def _check_amount(entry: _FaultEntry) -> None:
    if entry.by and entry.what in ("clock off", "restore"):
        parse_duration(entry.by.removeprefix("-"))
    elif entry.by and entry.what == "slow link":
        parse_rate(entry.by)
    elif entry.by:
        raise UsageError("`by` applies to clock off, slow link and restore only")


USUAL_FAULTS = b"""
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
"""The faults of `--faults usual`: each kind at rates of a bad month."""
