"""Agent release: a release of the agent software itself, whose slices are Python wheels instead of layers.

Its model has the reserved name `edgesplit-agent`. It has no plan, and one slice per kind of machine it was built for:
the slice's name contains version, Python and machine, and its only file is `wheels.tar`, with all wheels that the agent
needs there. It is signed, fetched chunk by chunk, verified, staged and rolled out like a model. Only the release key
signs one: it has no recut. Installing the wheels and switching over are in `edgesplit_agent.self_update`, building them
in `edgesplit_provisioning.kit`.
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

AGENT_MODEL: Final = "edgesplit-agent"
"""Model name of agent releases in statements, reports and rollouts; reserved."""
WHEELS_FILE: Final = "wheels.tar"
MACHINES: Final = ("aarch64", "x86_64")
_BUILD = re.compile(r"(?P<version>[0-9][0-9a-z.]{0,30})-cp3(?P<minor>[0-9]{1,2})-(?P<machine>aarch64|x86_64)")


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """A kind of machine: Python version and CPU architecture."""

    python: str
    """For example 3.11."""
    machine: str

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}"

    @property
    def tag(self) -> str:
        """For example `cp311-aarch64`: suffix of a build's name, and reported by devices."""
        return f"cp{self.python.replace('.', '')}-{self.machine}"


@dataclass(frozen=True, slots=True)
class Build:
    """One slice of an agent release: a version of the agent for one kind of machine."""

    version: str
    target: Target
    slice: Slice


def this_machine() -> Target:
    """The kind of machine that this process runs on."""
    return Target(f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())


def build_name(version: str, target: Target) -> str:
    """Name of the slice, for example `0.3.0-cp311-aarch64`; UsageError where version or target are not valid."""
    name = f"{version}-{target.tag}"
    if not _BUILD.fullmatch(name) or not identifiers.SLICE.fullmatch(name):
        raise UsageError(
            f"no agent release can be made of version {version[:40]!r} for {str(target)[:60]}: versions are spelt as in"
            f" 0.3.0 or 0.3.0rc1, Pythons as in 3.11, machines are {' and '.join(MACHINES)}"
        )
    return name


def public_version(version: str) -> str:
    """The version without its local part: 0.3.0 for `0.3.0+device`, as kits have it."""
    return version.partition("+")[0]


def is_agent_release(manifest: Manifest) -> bool:
    """True if this is a release of the agent and not of a model."""
    return manifest.model.partition("@")[0] == AGENT_MODEL


def agent_builds(manifest: Manifest) -> tuple[Build, ...]:
    """All builds of an agent release; TrustError or MalformedMessage where the manifest is not one of the agent."""
    if manifest.recut_of:
        raise TrustError("an agent release cannot be a recut: only the release key signs it")
    all_builds = tuple(_parse_build(build) for build in manifest.all_slices)
    if not all_builds or manifest.plans or len({build.target for build in all_builds}) != len(all_builds):
        raise MalformedMessage("an agent release has no plan, and one build for each kind of machine")
    if len({build.version for build in all_builds}) != 1:
        raise MalformedMessage("the builds of an agent release are of different versions")
    return all_builds


def build_for(manifest: Manifest, target: Target) -> Build:
    """The build for this kind of machine; UsageError lists the available ones."""
    all_builds = agent_builds(manifest)
    for build in all_builds:
        if build.target == target:
            return build
    raise UsageError(
        f"agent {all_builds[0].version} was not built for {target}, only for"
        f" {', '.join(str(build.target) for build in sorted(all_builds, key=lambda build: build.target))}"
    )


def _parse_build(slice_: Slice) -> Build:
    match = _BUILD.fullmatch(slice_.name)
    if match is None or slice_.format != "agent" or [file.name for file in slice_.files] != [WHEELS_FILE]:
        raise MalformedMessage(f"{slice_.name!r} is no build of the agent")
    if slice_.encryption is not None:
        raise MalformedMessage("an agent release is not encrypted")
    return Build(match["version"], Target(f"3.{match['minor']}", match["machine"]), slice_)
