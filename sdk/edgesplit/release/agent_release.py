"""A release of the agent itself: a release like any other, whose slices are no layers but wheels.

It is of the reserved model `edgesplit-agent`, has no plan, and one slice for each kind of machine that it was built
for: the slice's name says the version, the Python and the machine, its one file is `wheels.tar`, the wheels of all that
the agent needs there. So it is signed, fetched chunk by chunk, verified, staged and rolled out as models are. Only the
release key signs one: there is no other cut of it. Leaves to others: installing the wheels and changing over
(`edgesplit_agent.self_update`), and making them (`edgesplit_provisioning.kit`).
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from typing import Final

from edgesplit import identifiers
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.release.manifest import Manifest, Slice

AGENT: Final = "edgesplit-agent"
"""The model's name in statements, reports and rollouts; no model may be called so."""
WHEELS_FILE: Final = "wheels.tar"
MACHINES: Final = ("aarch64", "x86_64")
_BUILD = re.compile(r"(?P<version>[0-9][0-9a-z.]{0,30})-cp3(?P<minor>[0-9]{1,2})-(?P<machine>aarch64|x86_64)")


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """A kind of machine that wheels fit."""

    python: str
    """As in 3.11."""
    machine: str

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}"

    @property
    def tag(self) -> str:
        """As in `cp311-aarch64`: how a build's name ends, and what a device says of itself."""
        return f"cp{self.python.replace('.', '')}-{self.machine}"


@dataclass(frozen=True, slots=True)
class Build:
    """One slice of an agent release: that version of the agent for that kind of machine."""

    version: str
    target: Target
    slice: Slice


def this_machine() -> Target:
    """What this process runs on."""
    return Target(f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())


def build_name(version: str, target: Target) -> str:
    """The slice's name, as in `0.3.0-cp311-aarch64`; UsageError for what cannot be one."""
    name = f"{version}-{target.tag}"
    if not _BUILD.fullmatch(name) or not identifiers.SLICE.fullmatch(name):
        raise UsageError(
            f"no agent release can be made of version {version[:40]!r} for {str(target)[:60]}: versions are spelt as in"
            f" 0.3.0 or 0.3.0rc1, Pythons as in 3.11, machines are {' and '.join(MACHINES)}"
        )
    return name


def released(version: str) -> str:
    """The version without what a build says of itself: of `0.3.0+device`, as kits have it, 0.3.0."""
    return version.partition("+")[0]


def is_agent(manifest: Manifest) -> bool:
    """Is this a release of the agent, and not of a model?"""
    return manifest.model.partition("@")[0] == AGENT


def builds(manifest: Manifest) -> tuple[Build, ...]:
    """What an agent release consists of; TrustError or MalformedMessage where it is not what one must be."""
    if manifest.recut_of:
        raise TrustError("an agent release calls itself another cut: only the release key signs one")
    found = tuple(_build(one) for one in manifest.every_slice)
    if not found or manifest.plans or len({one.target for one in found}) != len(found):
        raise MalformedMessage("an agent release has no plan, and one build for each kind of machine")
    if len({one.version for one in found}) != 1:
        raise MalformedMessage("the builds of an agent release are of different versions")
    return found


def build_for(manifest: Manifest, target: Target) -> Build:
    """The build that fits; UsageError says for what there is one."""
    found = builds(manifest)
    for one in found:
        if one.target == target:
            return one
    raise UsageError(
        f"agent {found[0].version} was not built for {target}, only for"
        f" {', '.join(str(one.target) for one in sorted(found, key=lambda one: one.target))}"
    )


def _build(one: Slice) -> Build:
    named = _BUILD.fullmatch(one.name)
    if named is None or one.format != "agent" or [file.name for file in one.files] != [WHEELS_FILE]:
        raise MalformedMessage(f"{one.name!r} is no build of the agent")
    if one.sealed is not None:
        raise MalformedMessage("an agent release is not encrypted")
    return Build(named["version"], Target(f"3.{named['minor']}", named["machine"]), one)
