"""What a rollout and each of its devices can be, as plain values. `members` and `steps` say what follows from what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from edgesplit_controller.rollout.terms import Pace, Terms

RolloutState = Literal[
    "scheduled", "waiting", "running", "paused", "aborting", "aborted", "rolling back", "rolled back", "finished",
    "failed", "superseded",
]  # fmt: skip
MemberState = Literal[
    "queued", "told", "fetching", "trial", "succeeded", "failed", "timed out", "gone back", "skipped", "superseded"
]
MEMBER_STATES: tuple[MemberState, ...] = get_args(MemberState)
ENDED: frozenset[RolloutState] = frozenset(("aborted", "rolled back", "finished", "failed", "superseded"))
ON_THE_WAY: frozenset[MemberState] = frozenset(("told", "fetching", "trial"))
"""Told, and neither well nor ill yet."""
OPEN: frozenset[MemberState] = frozenset(("queued", *ON_THE_WAY))
LEFT: frozenset[MemberState] = frozenset(("skipped", "superseded"))
"""Not this rollout's any more: counted in no threshold."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a rollout."""

    name: str
    stage: int
    position: int
    """In the order in which devices are told."""
    state: MemberState = "queued"
    previous: str = ""
    """The release that it is to go back to; empty where it had none."""
    cause: str = ""
    """Why it failed; kept when it has gone back."""
    kind: str = ""
    """The same without what differs from device to device, to group failures by."""
    counter: int = 0
    """Of the statement that told it last: what it reports of an earlier one does not count."""
    told_at: float = 0.0
    ran_at: float = 0.0
    """When it first reported that the release runs; gates are judged from then on."""
    goes_back: bool = False
    """It was told to go back, and has not said that it did."""
    sent_back: bool = False
    """It was told to go back, once and for all."""
    counts: bool = False
    """As failed, in the stage's threshold."""
    unjudged: bool = False
    """Nothing was known of some gate when its time was up."""

    @property
    def is_open(self) -> bool:
        """Something is still to come of it."""
        return self.state in OPEN or self.goes_back


class Report(msgspec.Struct, frozen=True):
    """What a device says of the rollout's model, by the statement of that counter."""

    counter: int
    state: str
    """As `messages.ModelState.state`."""
    release: str
    """What runs."""
    wanted: str
    detail: str = ""


class Seen(msgspec.Struct, frozen=True):
    """What is known of a device besides its place in the rollout."""

    report: Report | None = None
    ours: bool = True
    """No newer rollout says what it shall run."""
    revoked: bool = False


class Tally(msgspec.Struct, frozen=True):
    """How one stage's devices stand."""

    states: Mapping[MemberState, int]
    failures: int = 0
    """That count in the threshold."""
    lenient: int = 0
    """Timed out, and not counted as failed."""
    judged: int = 0
    """Succeeded, with every gate judged."""
    open: int = 0

    @property
    def size(self) -> int:
        """Devices in the stage."""
        return sum(self.states.values())

    @property
    def counted(self) -> int:
        """Those that the thresholds are about."""
        return self.size - sum(self.states.get(state, 0) for state in LEFT) - self.lenient

    @property
    def succeeded(self) -> int:
        """Those that run the release well."""
        return self.states.get("succeeded", 0)


EMPTY = Tally({})


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A release on its way."""

    id: int
    model: str
    """Its name, without a version."""
    release: str
    terms: Terms
    state: RolloutState = "scheduled"
    stage: int = -1
    """The one that was begun last, from 0; -1: none was."""
    stages: int = 1
    approved: int = -1
    """Up to this stage."""
    excused: int = -1
    """Up to this stage an operator goes on without the evidence that is missing."""
    why: str = ""
    """Why it is paused, or ended as it did."""
    outcome: Literal["", "aborted", "failed"] = ""
    """What it will be once aborting is done."""
    following: bool = False
    """Devices that come to be meant are told, too; it goes on until a newer rollout or an operator ends it."""
    pace: Pace = Pace()
    began: float = 0.0
    ended: float = 0.0

    @property
    def has_ended(self) -> bool:
        """It does nothing by itself any more."""
        return self.state in ENDED


def tally(members: Iterable[Member]) -> dict[int, Tally]:
    """How each stage stands."""
    by_stage: dict[int, list[Member]] = {}
    for member in members:
        by_stage.setdefault(member.stage, []).append(member)
    return {stage: _tally(there) for stage, there in by_stage.items()}


def _tally(members: list[Member]) -> Tally:
    return Tally(
        states=Counter(member.state for member in members),
        failures=sum(member.counts for member in members),
        lenient=sum(member.state == "timed out" and not member.counts for member in members),
        judged=sum(member.state == "succeeded" and not member.unjudged for member in members),
        open=sum(member.is_open for member in members),
    )
