"""Click parameter types: a parser of `edgesplit` or of this module, whose UsageError becomes the option's error."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from edgesplit.errors import UsageError
from edgesplit.links import parse_link, parse_metrics_address
from edgesplit.plan import Link
from edgesplit.quantities import NUMBER, parse_duration, parse_energy, parse_fraction, parse_size

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
OBJECTIVES = {"latency": "latency", "p95": "latency_p95", "energy": "energy", "throughput": "throughput"}
ACCURACY = "accuracy"
"""The objective that families have beside these."""


class ParsedType(click.ParamType[T], Generic[T]):
    """What `parse` makes of the option's text."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """The parsed value; a default that is not text is taken as it is."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        try:
            return self._parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Number(click.FloatRange):
    """A number in a range; `nan` is rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        return self.fail(f"not a number: {value!r} (as in 1.5)", param, ctx) if number != number else number


def parse_objective(text: str) -> str | dict[str, float]:
    """The objective's name, or weights by name, as the planner takes them."""
    if text == ACCURACY:
        return text
    if text in OBJECTIVES:
        return OBJECTIVES[text]
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if name.strip() not in OBJECTIVES or not weight:
            known = ", ".join((*OBJECTIVES, ACCURACY))
            raise UsageError(f"not an objective: {part[:40]!r} (one of {known}, or weights as in latency=1,energy=0.5)")
        weights[OBJECTIVES[name.strip()]] = NUMBER.parse(weight)
    return weights


def parse_tier(text: str) -> tuple[str, str, Link]:
    """A tier between device and cloud: its name, its device profile (empty where the costs file contains it), and the
    link that reaches it."""
    match = re.fullmatch(r"([a-z][a-z0-9_]*)(?:=([^@]+))?@(.+)", text.strip())
    if not match:
        raise UsageError(f"not a tier: {text[:60]!r} (NAME=PROFILE@LINK, as in edge=jetson-nano@100mbit/2ms)")
    if match[1] in ("device", "cloud"):
        raise UsageError(
            f"tier name {match[1]!r} is taken: every plan has it already; choose another for the tier between"
        )
    return match[1], match[2] or "", parse_link(match[3])


def parse_codecs(text: str) -> tuple[str, ...]:
    """Names of codecs, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"not a list of codecs: {text[:60]!r} (as in raw or raw,raw+zstd)")
    return names


def parse_store(text: str) -> str:
    """The URL of a folder in an object store, as it is kept; empty text stays empty."""
    from edgesplit_controller.storage.object_store import ObjectUrl

    return str(ObjectUrl.parse(text)) if text else ""


def format_address(address: tuple[str, int] | None) -> str:
    """The address of a metrics server as an argument of a child process; empty for None."""
    if address is None:
        return ""
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def option_group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that adds these options to a command, in the order of the help."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
EXISTING_PATH = click.Path(exists=True, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)
PORT = click.IntRange(0, 65535)
POSITIVE = click.IntRange(1)
SIZE = ParsedType("size", partial(parse_size, least=0))
ENERGY = ParsedType("energy", parse_energy)
DURATION = ParsedType("duration", parse_duration)
FRACTION = ParsedType("share", parse_fraction)
OBJECTIVE = ParsedType("objective", parse_objective)
TIER = ParsedType("tier", parse_tier)
LINK = ParsedType("link", parse_link)
CODECS = ParsedType("codecs", parse_codecs)
S3_URL = ParsedType("URL", parse_store)
METRICS = ParsedType("ADDRESS:PORT", parse_metrics_address)
