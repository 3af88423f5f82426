"""What devices counted of the answers that a cascade or still frames may have changed, summed by release (pure).

Sums are kept for the releases that a device runs or shall run, each since it first ran there: the audits of one window
are few, and rollout gates judge the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from edgesplit.cascade import MOST_SCORE
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import CascadeCounts, StillCounts, TelemetryWindow
from edgesplit_partitioner.bounds.binomial import lower_share, upper_share

UNSURE = 0.1
"""Probability with which an interval of a measured share may be wrong, half of it on either side."""
MOST_COUNT = 2**53
"""Greatest sum, which every database and every JSON parser represents exactly."""
Stored = dict[str, Any]
"""Sums of a device by release, as they are stored."""


class AnswerAudits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums of one release on one device; None for what it does not do."""

    cascade: CascadeCounts | None = None
    still: StillCounts | None = None

    @property
    def audited(self) -> list[tuple[int, int]]:
        """Frames drawn for audit and those of them whose answer differed: of the cascade, and of still frames."""
        pairs = []
        if self.cascade is not None:
            pairs.append((self.cascade.audited, self.cascade.changed))
        if self.still is not None:
            pairs.append((self.still.audited_same + self.still.changed, self.still.changed))
        # More changed than audited is a device's error or its lie: it counts as all.
        return [(audited, min(changed, audited)) for audited, changed in pairs]

    def __add__(self, other: AnswerAudits) -> AnswerAudits:
        """The sum; threshold and allowed share are those of the right side, which is the newer one."""
        return AnswerAudits(cascade=_sum(self.cascade, other.cascade), still=_sum(self.still, other.still))


def audits_of(window: TelemetryWindow) -> AnswerAudits | None:
    """The counts of one telemetry window; None where it has none."""
    if window.cascade is None and window.still is None:
        return None
    return AnswerAudits(cascade=window.cascade, still=window.still)


def with_window(stored: Stored | None, window: TelemetryWindow, releases: Collection[str]) -> Stored | None:
    """The stored sums with those of a window. `releases`: those that the device runs or shall run; others are left
    out."""
    fresh = audits_of(window)
    if fresh is None or window.release not in releases:
        return stored
    kept = {release: sums for release, sums in (stored or {}).items() if release in releases}
    before = sums_of(kept, window.release)
    return {**kept, window.release: msgspec.to_builtins(fresh if before is None else before + fresh)}


def sums_of(stored: Mapping[str, Any] | None, release: str) -> AnswerAudits | None:
    """The sums of a release; None where nothing was counted."""
    sums = (stored or {}).get(release)
    return None if sums is None else msgspec.convert(sums, AnswerAudits)


def audits_view(sums: AnswerAudits) -> dict[str, Any]:
    """Sums as the API returns them: the measured share with its interval beside what is allowed. A `threshold` of null
    says that every answer is escalated."""
    view: dict[str, Any] = {"cascade": None, "still": None}
    audited = iter(sums.audited)
    if sums.cascade is not None:
        counts = sums.cascade
        threshold = counts.threshold if counts.threshold < MOST_SCORE else None
        view["cascade"] = {**msgspec.structs.asdict(counts), "threshold": threshold, **measured_share(*next(audited))}
    if sums.still is not None:
        view["still"] = {**msgspec.structs.asdict(sums.still), **measured_share(*next(audited))}
    return view


def measured_share(audited: int, changed: int) -> dict[str, Any]:
    """The share of audited answers that differed, and between which shares it lies, 90 % sure; null where nothing was
    audited."""
    if not audited:
        return {"audited": 0, "changed": 0, "share": None, "at_least": None, "at_most": None}
    return {
        "audited": audited, "changed": changed, "share": changed / audited,
        "at_least": lower_share(changed, audited, UNSURE / 2), "at_most": upper_share(changed, audited, UNSURE / 2),
    }  # fmt: skip


def with_running_shares(buckets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Buckets of a history, oldest first, each with what the audits of it and of those before it measured together:
    `cascade_measured` and `still_measured`, as `measured_share` tells them, where there were any."""
    sums = {"cascade": [0, 0], "still": [0, 0]}
    shown: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
    result = []
    for bucket in buckets:
        view = dict(bucket)
        for kind, (audited, changed) in sums.items():
            counts = bucket.get(kind)
            if counts is None:
                continue
            differed = counts["changed"]
            drawn = counts["audited"] if kind == "cascade" else counts["audited_same"] + differed
            both = sums[kind] = [audited + drawn, changed + min(differed, drawn)]
            pair = (both[0], both[1])
            if kind not in shown or shown[kind][0] != pair:  # quantiles are dear, and most minutes audit nothing
                shown[kind] = (pair, measured_share(*pair))
            view[f"{kind}_measured"] = shown[kind][1]
        result.append(view)
    return result


def _sum(before: Any, newer: Any) -> Any:
    """Counts added up field by field; a field that is no count is the newer one's."""
    if before is None or newer is None:
        return before if newer is None else newer
    sums: dict[str, Any] = {}
    for name in newer.__struct_fields__:
        first, second = getattr(before, name), getattr(newer, name)
        if isinstance(second, dict):
            sums[name] = _added(first, second)
        elif isinstance(second, int):
            sums[name] = min(MOST_COUNT, first + second)
    return msgspec.structs.replace(newer, **sums)


def _added(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Counts by name added up; names beyond the number that a family may have are left out, because devices choose
    them."""
    total = dict(counts)
    for name, count in more.items():
        if name in total or len(total) < LIMITS.variants:
            total[name] = min(MOST_COUNT, total.get(name, 0) + count)
    return total
