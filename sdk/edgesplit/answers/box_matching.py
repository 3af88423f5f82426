"""Boxes of one detector beside those of another: suppression of overlapping boxes, and partners.

Two boxes may be partners if they have the same label and overlap by at least half (intersection over union). Two
answers are the same if every box of either has a partner of its own: a perfect matching. That is the same from both
sides and in any order of the boxes, which a greedy choice by score is not: its best first pair can leave another box
alone that had no second choice. The matching is found by augmenting paths (Kuhn, Naval Research Logistics Quarterly
1955).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgesplit.answers.box_layouts import Boxes
from edgesplit.lazy_import import Tensor, np

LEAST_OVERLAP = 0.5
"""Intersection over union from which boxes are the same thing: for partners, and for suppression within one answer."""
CANDIDATE_SCORE = 0.05
"""Boxes below this score, and below the rule's threshold, are noise: not even candidates."""
MOST_CANDIDATES = 1_000
"""Boxes with the highest scores that are considered; suppression takes time by their square."""


def overlaps(one: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of a box [4] with each of others [n, 4]; 0 where it is not defined."""
    left_top, right_bottom = np.maximum(one[:2], others[:, :2]), np.minimum(one[2:], others[:, 2:])
    shared = np.prod(np.clip(right_bottom - left_top, 0.0, None), axis=1)
    area = np.prod(np.clip(one[2:] - one[:2], 0.0, None))
    areas = np.prod(np.clip(others[:, 2:] - others[:, :2], 0.0, None), axis=1)
    union = area + areas - shared
    parts: Tensor = np.divide(shared, union, out=np.zeros_like(shared), where=np.isfinite(union) & (union > 0.0))
    return parts


def candidates(boxes: Boxes, threshold: float, least_overlap: float = LEAST_OVERLAP) -> Boxes:
    """Boxes after suppression, by falling score: of boxes of one class that overlap by at least `least_overlap`, the
    one with the highest score.

    Boxes somewhat below the threshold are among them. They suppress none above it, so its answer is those whose score
    reaches it. Boxes that are not finite are no candidates.
    """
    usable = np.isfinite(boxes.corners).all(axis=1) & (boxes.scores >= min(CANDIDATE_SCORE, threshold))
    boxes = boxes.select(usable)
    left = np.argsort(-boxes.scores, kind="stable")[:MOST_CANDIDATES]
    kept: list[int] = []
    while len(left):
        best, rest = left[0], left[1:]
        kept.append(int(best))
        same_class = boxes.classes[rest] == boxes.classes[best]
        left = rest[~(same_class & (overlaps(boxes.corners[best], boxes.corners[rest]) >= least_overlap))]
    return boxes.select(np.array(kept, np.int64))


def all_have_partners(ours: Boxes, theirs: Boxes) -> bool:
    """Whether each box of either side has a partner of its own; `classes` are labels that both sides share."""
    if len(ours) != len(theirs):
        return False
    fitting = [
        np.flatnonzero(
            (theirs.classes == ours.classes[index]) & (overlaps(ours.corners[index], theirs.corners) >= LEAST_OVERLAP)
        ).tolist()
        for index in range(len(ours))
    ]
    partner_of: dict[int, int] = {}
    return all(_augment(index, fitting, partner_of) for index in range(len(ours)))


def _augment(start: int, fitting: Sequence[Sequence[int]], partner_of: dict[int, int]) -> bool:
    """Give box `start` a partner, where needed by giving others another one; `partner_of` is by the other side's box.

    Without recursion, as there may be a thousand boxes: `reached_from` is the path back.
    """
    reached_from: dict[int, int] = {}
    waiting = [start]
    while waiting:
        ours = waiting.pop()
        for theirs in fitting[ours]:
            if theirs in reached_from:
                continue
            reached_from[theirs] = ours
            if theirs in partner_of:
                waiting.append(partner_of[theirs])
                continue
            _assign_along_path(theirs, reached_from, partner_of)
            return True
    return False


def _assign_along_path(end: int, reached_from: dict[int, int], partner_of: dict[int, int]) -> None:
    """Swap the partners on the path that ends at a free box."""
    had_partner = {ours: theirs for theirs, ours in partner_of.items()}
    theirs: int | None = end
    while theirs is not None:
        ours = reached_from[theirs]
        partner_of[theirs] = ours
        theirs = had_partner.get(ours)
