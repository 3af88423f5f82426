"""Click parameter types for quantities and other structured values: `512MB`, `0.5J`, `100ms`, `latency=1,energy=0.5`,
tiers, links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import click

from edgesplit.errors import EdgeError
from edgesplit.links import parse_link
from edgesplit.plan import Link

BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
JOULES = {"j": 1.0, "mj": 1e-3, "uj": 1e-6}
LIFETIME_UNITS = {"m": 60.0, "h": 3_600.0, "d": 86_400.0, "y": 31_536_000.0}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
OBJECTIVES = {"latency": "latency", "p95": "latency_p95", "energy": "energy", "throughput": "throughput"}


class Quantity(click.ParamType[float]):
    """A number with a unit."""

    def __init__(self, name: str, units: Mapping[str, float], example: str) -> None:
        self.name = name
        self._units, self._example = units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The value in the unit whose factor is 1."""
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", str(value).strip().lower())
        if not match or match[2] not in self._units:
            self.fail(f"{str(value)[:40]!r} is no {self.name}; write it as in {self._example}", param, ctx)
        return float(match[1]) * self._units[match[2]]


SIZE = Quantity("size", BYTES, "512MB or 64KiB")
ENERGY = Quantity("energy", JOULES, "0.5J or 20mJ")
DURATION = Quantity("duration", SECONDS, "100ms or 0.1s")
INTERVAL = Quantity("rhythm", {"s": 1.0, "m": 60.0}, "10s or 1m")
LIFETIME = Quantity("length of time", LIFETIME_UNITS, "90d or 12h")


class Number(click.FloatRange):
    """A number in a range; `nan` is rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is no number to count with", param, ctx) if math.isnan(number) else number


class ObjectiveType(click.ParamType[str | dict[str, float]]):
    """One objective, or a weighted sum of several."""

    name = "objective"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | dict[str, float]:
        """The objective's name or its weights, as the planner takes them."""
        if not isinstance(value, str):
            return dict(value)
        if value in OBJECTIVES:
            return OBJECTIVES[value]
        weights: dict[str, float] = {}
        for part in value.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*", part)
            if not match or match[1] not in OBJECTIVES:
                known = ", ".join(OBJECTIVES)
                self.fail(
                    f"{part[:40]!r} is none of {known}, nor a weight for one as in latency=1,energy=0.5", param, ctx
                )
            weights[OBJECTIVES[match[1]]] = float(match[2])
        return weights


class TierType(click.ParamType[tuple[str, str, Link]]):
    """A tier between device and cloud: its name, its device profile, and the link that reaches it."""

    name = "tier"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str, Link]:
        """Name, profile (empty where the costs file contains it) and link."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([a-z][a-z0-9_]*)(?:=([^@]+))?@(.+)", str(value).strip())
        if not match:
            self.fail(
                f"{str(value)[:60]!r} is no tier; write it as in edge=jetson-nano@100mbit/2ms, its name in a-z",
                param,
                ctx,
            )
        if match[1] in ("device", "cloud"):
            self.fail(f"every plan has the tier {match[1]!r} already; call the one between otherwise", param, ctx)
        return match[1], match[2] or "", _parse_link(match[3], self, param, ctx)


class LinkType(click.ParamType[Link]):
    """A link by name or figures."""

    name = "link"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Link:
        """The parsed link."""
        return value if isinstance(value, Link) else _parse_link(str(value), self, param, ctx)


def _parse_link(
    text: str, kind: click.ParamType[Any], param: click.Parameter | None, ctx: click.Context | None
) -> Link:
    try:
        return parse_link(text)
    except EdgeError as error:
        kind.fail(str(error), param, ctx)


class CodecsType(click.ParamType[tuple[str, ...]]):
    """Names of codecs, separated by commas."""

    name = "codecs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(","))
        if not all(names):
            self.fail(f"{str(value)[:60]!r} is no list of codecs; write it as in raw or raw,raw+zstd", param, ctx)
        return names


OBJECTIVE, TIER, LINK, CODECS = ObjectiveType(), TierType(), LinkType(), CodecsType()
