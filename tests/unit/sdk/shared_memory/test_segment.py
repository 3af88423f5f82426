"""Segments of shared memory: which are open is known at every moment, whatever closes them."""

from __future__ import annotations

import threading

import numpy as np

from edgesplit.shared_memory import segment
from edgesplit.shared_memory.segment import Segment

PATIENCE_S = 20.0


def holds(one: Segment) -> bool:
    """Is it among the open ones?"""
    return Segment.containing(np.frombuffer(one.memory, np.uint8)) is not None


def test_garbage_collection_during_close_does_not_deadlock() -> None:
    """The collector may run while a segment is being removed from the table: it closed its own segments then, and
    waited for ever for the lock that its own thread held."""
    first, second, kept = Segment.create(4096), Segment.create(4096), Segment.create(4096)

    garbage = [second]

    def collected() -> None:  # in the place of a reference, so that it happens just there
        if garbage:
            garbage.pop().close()

    segment._open = (collected, *segment._open)  # type: ignore[assignment]
    closing = threading.Thread(target=first.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    segment._open = tuple(view for view in segment._open if view is not collected)  # type: ignore[comparison-overlap]

    assert not closing.is_alive()
    assert (holds(first), holds(second), holds(kept)) == (False, False, True)
    kept.close()
