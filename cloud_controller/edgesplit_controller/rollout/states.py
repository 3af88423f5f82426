"""States of a rollout and of each of its devices, as plain values. The transitions are in `device_step` (one device)
and `decide` (the rollout)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from edgesplit_controller.rollout.terms import RateState, Terms

RolloutState = Literal[
    "scheduled", "waiting", "running", "paused", "aborting", "aborted", "rolling back", "rolled back", "finished",
    "failed", "superseded",
]  # fmt: skip
MemberState = Literal[
    "queued",
    "assigned",
    "fetching",
    "trial",
    "succeeded",
    "failed",
    "timed out",
    "rolled back",
    "skipped",
    "superseded",
]
MEMBER_STATES: tuple[MemberState, ...] = get_args(MemberState)
ENDED: frozenset[RolloutState] = frozenset(("aborted", "rolled back", "finished", "failed", "superseded"))
"""States in which a rollout does nothing by itself."""
IN_PROGRESS: frozenset[MemberState] = frozenset(("assigned", "fetching", "trial"))
"""States of a device that was assigned the release and has neither succeeded nor failed."""
OPEN: frozenset[MemberState] = frozenset(("queued", *IN_PROGRESS))
"""States of a device that still has to be assigned the release, or is in progress."""
NOTHING = "nothing"
"""Stands for a release where a device shall run none of the model: as `Rollout.release` in an undeployment, and as
`Member.previous` of a device that ran none before, from which rolling back removes the model."""
EXCLUDED: frozenset[MemberState] = frozenset(("skipped", "superseded"))
"""States of a device that no longer belongs to the rollout; it counts in no threshold."""


def as_reported(release: str) -> str:
    """The release as a device reports it: empty for `NOTHING`."""
    return "" if release == NOTHING else release


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a rollout."""

    name: str
    stage: int
    position: int
    """Place in the order in which devices are assigned the release."""
    state: MemberState = "queued"
    previous: str = ""
    """The release to roll back to; `NOTHING` if the device ran none of the model; empty if there is nothing to go back
    to, because the device ran this release already."""
    cause: str = ""
    """Why the device failed; kept after it was rolled back."""
    kind: str = ""
    """The cause without what differs from device to device, by which failures are grouped."""
    counter: int = 0
    """Counter of the device's last statement in this rollout; a report on an earlier statement is ignored."""
    assigned_at: float = 0.0
    """Unix time of that statement."""
    ran_at: float = 0.0
    """Unix time of the first report that the release runs, from which gates are judged; 0 before."""
    rolls_back: bool = False
    """A rollback was assigned and its end is awaited."""
    sent_back: bool = False
    """A rollback was assigned. Never reset."""
    counts: bool = False
    """Counts as failed in the stage's threshold."""
    unjudged: bool = False
    """Some gate had no evidence when its time was over."""

    @property
    def is_open(self) -> bool:
        """Whether an outcome of this device is still awaited."""
        return self.state in OPEN or self.rolls_back


class ModelReport(msgspec.Struct, frozen=True):
    """What a device reports of the rollout's model, on the statement of that counter."""

    statement_counter: int
    state: str
    """`messages.ModelState.state`."""
    release: str
    """The release that runs; empty for none."""
    desired_release: str
    """The release that the device's statement assigns; empty for none."""
    detail: str = ""


class DeviceFacts(msgspec.Struct, frozen=True):
    """Facts about a device that are not part of its state in the rollout."""

    report: ModelReport | None = None
    ours: bool = True
    """No newer rollout governs the model on this device."""
    revoked: bool = False


class RollbackOutlook(msgspec.Struct, frozen=True):
    """What a rollback would do, as counts of devices."""

    changed: int = 0
    """It would change what these run."""
    same_before: int = 0
    """These ran the release before the rollout already, or it is not known what they ran."""
    taken: int = 0
    """A newer rollout governs the model on these."""
    lost: int = 0
    """These cannot return, because the release that they ran before was removed."""
    undone: int = 0
    """This rollout has returned these to what they ran before."""
    taken_by: int = 0
    """The newest such rollout; 0 where none is known."""


class Tally(msgspec.Struct, frozen=True):
    """Counts of the devices in one stage."""

    states: Mapping[MemberState, int]
    failures: int = 0
    """Devices that count as failed in the threshold."""
    lenient: int = 0
    """Devices that timed out and do not count as failed."""
    judged: int = 0
    """Devices that succeeded with evidence for every gate."""
    open: int = 0
    """Devices whose outcome is awaited."""

    @property
    def size(self) -> int:
        """Number of devices in the stage."""
        return sum(self.states.values())

    @property
    def counted(self) -> int:
        """Number of devices over which thresholds are computed."""
        return self.size - sum(self.states.get(state, 0) for state in EXCLUDED) - self.lenient

    @property
    def succeeded(self) -> int:
        """Number of devices that run the release and passed its gates."""
        return self.states.get("succeeded", 0)


EMPTY_TALLY = Tally({})


def count_states(tallies: Iterable[Tally]) -> dict[str, int]:
    """Number of devices by state, without states that no device is in."""
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update({str(state): count for state, count in tally.states.items() if count})
    return dict(total)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a release: its terms and its state."""

    id: int
    model: str
    """The model's name, without a version."""
    release: str
    """Digest of the release that the devices shall run; `NOTHING`: the model is undeployed."""
    terms: Terms
    state: RolloutState = "scheduled"
    stage: int = -1
    """The stage that was begun last, counted from 0; -1: none was."""
    stages: int = 1
    approved: int = -1
    """The last stage that was approved."""
    excused: int = -1
    """Up to this stage an operator has waived missing evidence."""
    reason: str = ""
    """Why it is paused, or why it ended."""
    outcome: Literal["", "aborted", "failed"] = ""
    """Final state once aborting is done."""
    following: bool = False
    """Devices that match the targets later are added; the rollout goes on until a newer one or an operator ends it."""
    rate_state: RateState = RateState()
    began: float = 0.0
    ended: float = 0.0

    @property
    def withdraws(self) -> bool:
        """Whether it removes the model from its devices."""
        return self.release == NOTHING

    @property
    def has_ended(self) -> bool:
        """Whether the rollout does nothing by itself any more."""
        return self.state in ENDED
