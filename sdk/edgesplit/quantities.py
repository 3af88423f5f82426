"""Quantities as people write them: sizes, durations, rates, power, energy, percentages, hours of the day.

Each `parse_…` returns a number in SI units (bytes, seconds, watts, joules, bytes per second, events per second; a
percentage as a fraction). Upper and lower case are the same. Anything else is a UsageError of one form, which names the
units, the bounds and an example: `not a duration: 'soon' (a number with us, ms, s, m, h, d or y, as in 90s or 1h30m)`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgesplit.errors import UsageError

ABOVE_ZERO = sys.float_info.min
"""The lower bound of a quantity that must not be 0."""
DAY_S = 86_400.0
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?|\.[0-9]+)\s*([a-z%/]*)")
_DAILY_SPAN = re.compile(r"([0-9]{1,2}):([0-5][0-9])\s*-\s*([0-9]{1,2}):([0-5][0-9])")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of quantity, with its parser and its formatter."""

    name: str
    units: Mapping[str, float]
    """Factor by unit, in the order in which `format` tries them: it takes the first one that is no larger."""
    example: str
    synonyms: Mapping[str, float] = field(default_factory=dict)
    """Units that are accepted but not named in messages; empty for a number without a unit."""
    is_sum: bool = False
    """Several parts may follow each other, as in 1h30m."""

    @property
    def factors(self) -> Mapping[str, float]:
        """Factor by unit in lower case, synonyms included."""
        return {unit.lower(): factor for unit, factor in self.units.items()} | dict(self.synonyms)

    def parse(self, text: str, *, least: float = 0.0, most: float = sys.float_info.max) -> float:
        """The number that `text` spells, from `least` to `most`; UsageError otherwise."""
        lower = text.strip().lower()
        factors = self.factors
        parts = _PART.findall(re.sub(r"\s*/\s*", "/", lower))
        is_complete = "".join(number + unit for number, unit in parts) == "".join(lower.split())
        if is_complete and parts and (len(parts) == 1 or self.is_sum) and all(unit in factors for _, unit in parts):
            # Division by a whole number is rounded once: 57% is 0.57, where 57 * 0.01 is not.
            value = sum(
                float(number) * factors[unit] if factors[unit] >= 1 else float(number) / round(1 / factors[unit])
                for number, unit in parts
            )
            if least <= value <= most:
                return value
        article, allowed = "an" if self.name[0] in "aeiou" else "a", self._allowed(least, most)
        raise UsageError(f"not {article} {self.name}: {text[:80]!r} ({allowed}, as in {self.example})")

    def format(self, value: float) -> str:
        """The number in its largest fitting unit with seven significant digits, as `parse` reads it."""
        unit = next(
            (unit for unit, factor in self.units.items() if value >= factor),
            min(self.units, key=self.units.__getitem__),
        )
        return f"{value / self.units[unit]:.7g}{unit}"

    def _allowed(self, least: float, most: float) -> str:
        units = sorted(self.units, key=self.units.__getitem__)
        unit_list = " or ".join([", ".join(units[:-1]), units[-1]] if len(units) > 1 else units)
        allowed = "a number alone or" if "" in self.synonyms else "a number"
        allowed += f" with {unit_list}" if unit_list else ""
        if least:
            allowed += ", above 0" if least == ABOVE_ZERO else f", at least {self.format(least)}"
        return allowed if most == sys.float_info.max else f"{allowed}, at most {self.format(most)}"


_DECIMAL = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
_BINARY = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}
SIZE = Quantity(
    "size", _DECIMAL | _BINARY, "2GB or 64KiB",
    {unit.lower().removesuffix("b"): factor for unit, factor in (_DECIMAL | _BINARY).items()},
)  # fmt: skip
DURATION = Quantity(
    "duration", {"d": DAY_S, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "y": 365 * DAY_S},
    "90s or 1h30m", {"min": 60.0}, is_sum=True,
)  # fmt: skip
FREQUENCY = Quantity(
    "rate", {"/s": 1.0, "/m": 1 / 60.0, "/h": 1 / 3_600.0, "/d": 1 / DAY_S}, "100/min or 0.5/d",
    {"/min": 1 / 60.0, "/ms": 1e3},
)  # fmt: skip
# Bits only: "Mb/s" and "MB/s" differ by a factor of eight, and in nothing but case.
_BITS = {"gbit": 125e6, "mbit": 125e3, "kbit": 125.0, "bit": 0.125}
DATA_RATE = Quantity(
    "rate", _BITS, "500kbit or 2mbit",
    {unit + suffix: factor for unit, factor in _BITS.items() for suffix in ("/s", "ps")},
)  # fmt: skip
POWER = Quantity("power", {"W": 1.0, "mW": 1e-3}, "4W or 3500mW")
ENERGY = Quantity("energy", {"J": 1.0, "mJ": 1e-3, "uJ": 1e-6}, "0.5J or 20mJ")
NUMBER = Quantity("number", {"": 1.0}, "10 or 0.5")
PERCENTAGE = Quantity("percentage", {"%": 0.01}, "0.5% or 20%")
FRACTION = Quantity("fraction", {"%": 0.01}, "0.5% or 0.005", {"": 1.0})

parse_duration = DURATION.parse
parse_power = POWER.parse
parse_energy = ENERGY.parse


def parse_size(text: str, *, least: int = 1) -> int:
    """A size in whole bytes, as in 512MB, 1.5GiB or 4096."""
    return int(SIZE.parse(text, least=least, most=1e15))


def parse_rate(text: str) -> float:
    """A data rate such as 2mbit, in bytes per second."""
    return DATA_RATE.parse(text, least=ABOVE_ZERO, most=1e12)


def parse_frequency(text: str) -> float:
    """Events per second of a rate such as 100/min or 0.5/d."""
    return FREQUENCY.parse(text, least=ABOVE_ZERO, most=1e6)


def parse_percentage(text: str, *, least: float = 0.0, most: float = 1.0) -> float:
    """The fraction of a percentage such as 20%."""
    return PERCENTAGE.parse(text, least=least, most=most)


def parse_fraction(text: str) -> float:
    """A fraction from 0 to 1, written as 0.5% or as 0.005."""
    return FRACTION.parse(text, most=1.0)


def parse_daily_span(text: str) -> tuple[int, int]:
    """Beginning and end of a span of the day such as 01:00-05:00, in minutes since midnight; across midnight where it
    ends earlier than it begins."""
    if match := _DAILY_SPAN.fullmatch(text.strip()):
        hours = [int(part) for part in match.groups()]
        begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
        if max(begin, end) <= 1_440 and begin % 1_440 != end % 1_440:
            return begin % 1_440, end % 1_440
    raise UsageError(
        f"not a span of the day: {text[:80]!r} (HH:MM-HH:MM, its beginning other than its end, as in 01:00-05:00 or"
        " 22:30-06:00)"
    )


def format_duration(seconds: float) -> str:
    """A duration for people, as `parse_duration` reads it: `1h30m`, `45s`; below ten seconds with three significant
    digits, as in `2.5s` or `150ms`, above in whole seconds."""
    if seconds < 10:
        return DURATION.format(float(f"{seconds:.3g}")) if seconds > 0 else "0s"
    whole = int(seconds)
    parts = ((whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def format_percentage(share: float) -> str:
    """A share in per cent with three digits, as in `2 %` or `0.125 %`."""
    return f"{100.0 * share:.3g} %"


def format_size(count: float | None) -> str:
    """A size in binary units, as in `1.5 MiB`; `-` for None."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
