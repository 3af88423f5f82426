"""Which version of the agent runs: the state in `versions.json` and its transitions, as pure functions (for models see
`state.slots`).

The *installed* version is the one that `install.sh` put there as root. The launcher is part of it, self-update never
changes it, and it runs when no other version can. A version that came as a release runs on trial first; after three of
its starts that were not found healthy, the previous version runs again. The file is a contract between versions of the
agent: fields are only ever added, each with a default, because a launcher drops fields that it does not define.
"""

from __future__ import annotations

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_agent.state.slots import UNHEALTHY_STARTS, Slots

INSTALLED = ""
"""Stands in place of a release digest for the version that was installed rather than delivered as a release."""


class Versions(Slots, frozen=True, kw_only=True, omit_defaults=True):
    """State of the agent's versions on this device: `versions.json`. An empty slot (`INSTALLED`) means the installed
    version."""

    installed: str = ""
    """Installed version under which the rest of this state was decided. Where a different version has been installed
    since, that version runs and the rest is discarded."""
    unhealthy_starts: int = 0
    """Starts of the running version since it was last found healthy; starts of the installed version are not counted.
    """
    rejected: dict[str, str] = msgspec.field(default_factory=dict)
    """Reason by release: failed after it was activated, and not tried again under this statement."""
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    """Reason by release: refused before it ever ran. Recorded because unpacking it again at every start would take
    minutes on a slow card."""
    counter: int = 0
    """Counter of the statement under which the last version was tried or refused."""
    served: tuple[str, ...] = ()
    """Models that answered before the trial and must answer again for it to succeed."""
    offline: bool = False
    """The broker was unreachable before the trial, as where a release bundle brought the version: the trial does not
    require it."""


def with_start_counted(versions: Versions, installed: str) -> Versions:
    """Count a start of `running`. The result must be on disk before anything of that version is loaded."""
    if versions.installed != installed:
        versions = Versions(installed=installed) if versions.installed else versions
    if versions.unhealthy_starts >= UNHEALTHY_STARTS:
        versions = with_rollback(versions, f"{versions.unhealthy_starts} starts in a row were not found healthy")
    return _replace(versions, unhealthy_starts=versions.unhealthy_starts + 1) if versions.running else versions


def with_rollback(versions: Versions, reason: str) -> Versions:
    """Mark the running version as bad: after a failed trial the committed version runs again, otherwise the installed
    one."""
    if not versions.running:
        return versions
    bad = {**versions.rejected, versions.running: reason}
    committed = versions.committed if versions.trial else INSTALLED
    return _replace(
        versions, committed=committed, trial=INSTALLED, unhealthy_starts=0, rejected=bad, served=(), offline=False
    )


def with_damage(versions: Versions, reason: str) -> Versions:
    """The version that is to run differs on disk from what was installed. A committed version becomes not committed and
    is installed again; one on trial is rolled back."""
    if versions.trial:
        return with_rollback(versions, reason)
    return _replace(versions, committed=INSTALLED, unhealthy_starts=0)


def with_activated(
    versions: Versions, release: str, served: tuple[str, ...], counter: int, installed: str, *, offline: bool = False
) -> Versions:
    """Make this release the version of the next start: on trial, unless it is the committed one. `counter` is that of
    the statement that requests it; `installed` is the installed version beside which it is tried."""
    trial = INSTALLED if release == versions.committed else release
    installed = versions.installed or installed
    changed = _replace(versions, installed=installed, trial=trial, unhealthy_starts=0, counter=counter)
    return _replace(changed, served=tuple(sorted(served)), offline=offline)


def with_trial_committed(versions: Versions) -> Versions:
    """Commit the running version: it was found healthy."""
    return _replace(versions, committed=versions.running, trial=INSTALLED, unhealthy_starts=0, served=(), offline=False)


def with_refusal(versions: Versions, release: str, reason: str, counter: int) -> Versions:
    """Record that a release cannot run here, because its own check refused or its wheels are invalid."""
    return _replace(versions, refused={**versions.refused, release: reason}, counter=counter)


def with_statement(versions: Versions, counter: int) -> Versions:
    """Adopt the counter of an accepted statement; a higher one clears what was bad or refused under the last."""
    if counter <= versions.counter or not (versions.rejected or versions.refused):
        return versions
    return _replace(versions, rejected={}, refused={}, counter=counter)


def with_start_uncounted(versions: Versions, release: str) -> Versions:
    """That release was asked to end: its start counts neither as healthy nor as unhealthy."""
    if versions.running != release or not versions.unhealthy_starts:
        return versions
    return _replace(versions, unhealthy_starts=versions.unhealthy_starts - 1)


_replace = msgspec.structs.replace

warm_up_structs(__name__)
