"""Which version of the agent runs: how `versions.json` changes, as pure functions (for models: `activation`).

The *installed* version is the one that `install.sh` put there, as root: the launcher is part of it, it is never changed
from here, and it is what runs when nothing else is left. A version that came as a release runs on trial first; three of
its starts that were not found healthy, and the one before runs again. The file is a contract between versions: fields
are only ever added, and what a launcher does not know it leaves alone.
"""

from __future__ import annotations

import msgspec

from edgesplit.msgspec_warmup import settle
from edgesplit_agent.state.slots import UNHEALTHY_STARTS

INSTALLED = ""
"""In place of a release: the version that was installed, not sent."""


class Versions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of the agent's versions here: `versions.json`."""

    installed: str = ""
    """The installed version beside which all below was decided; where another has been installed since, that one runs,
    and the rest is forgotten."""
    committed: str = INSTALLED
    """Release that was found healthy."""
    trial: str = INSTALLED
    """Release that runs in its place until it is found healthy or not."""
    starts: int = 0
    """Of what runs, since one was found healthy; starts of the installed version are not counted."""
    bad: dict[str, str] = {}
    """Why, by release: not tried again under this statement."""
    refused: dict[str, str] = {}
    """The same of those that never ran: to unpack them again at every start would take a slow card minutes."""
    counter: int = 0
    """Of the statement under which the last one was tried, or refused."""
    served: tuple[str, ...] = ()
    """The models that answered before the trial, and must again."""
    offline: bool = False
    """There was no broker before the trial, as where a bundle brought the version: so none is demanded of it."""

    @property
    def running(self) -> str:
        """The release that is to run; `INSTALLED` for none."""
        return self.trial or self.committed


def begun(versions: Versions, installed: str) -> Versions:
    """A start begins, of `running`. To be on disk before anything of that version is loaded."""
    if versions.installed != installed:
        versions = Versions(installed=installed) if versions.installed else versions
    if versions.starts >= UNHEALTHY_STARTS:
        versions = given_up(versions, f"{versions.starts} starts in a row were not found healthy")
    return _replace(versions, starts=versions.starts + 1) if versions.running else versions


def given_up(versions: Versions, reason: str) -> Versions:
    """What runs is bad: after a trial the committed version runs again, else the installed one."""
    if not versions.running:
        return versions
    bad = {**versions.bad, versions.running: reason}
    committed = versions.committed if versions.trial else INSTALLED
    return _replace(versions, committed=committed, trial=INSTALLED, starts=0, bad=bad, served=(), offline=False)


def damaged(versions: Versions, reason: str) -> Versions:
    """What is to run is not, on disk, what was installed. A committed version is put together again; one on trial has
    had its chance."""
    if versions.trial:
        return given_up(versions, reason)
    return _replace(versions, committed=INSTALLED, starts=0)


def activated(
    versions: Versions, release: str, served: tuple[str, ...], counter: int, installed: str, *, offline: bool = False
) -> Versions:
    """From the next start on this release runs: on trial, unless it is the one that was found healthy already.

    `counter` is of the statement that asks for it; `installed` the version beside which it is tried."""
    trial = INSTALLED if release == versions.committed else release
    installed = versions.installed or installed
    tried = _replace(versions, installed=installed, trial=trial, starts=0, counter=counter)
    return _replace(tried, served=tuple(sorted(served)), offline=offline)


def committed(versions: Versions) -> Versions:
    """What runs was found healthy."""
    return _replace(versions, committed=versions.running, trial=INSTALLED, starts=0, served=(), offline=False)


def refused(versions: Versions, release: str, reason: str, counter: int) -> Versions:
    """It cannot run here, by its own word or because its wheels are none."""
    return _replace(versions, refused={**versions.refused, release: reason}, counter=counter)


def obeying(versions: Versions, counter: int) -> Versions:
    """A statement was believed; a newer one forgives what was bad under the last."""
    if counter <= versions.counter or not (versions.bad or versions.refused):
        return versions
    return _replace(versions, bad={}, refused={}, counter=counter)


def stopped(versions: Versions, release: str) -> Versions:
    """That release is asked to end, which says nothing about it."""
    if versions.running != release or not versions.starts:
        return versions
    return _replace(versions, starts=versions.starts - 1)


_replace = msgspec.structs.replace

settle(__name__)
