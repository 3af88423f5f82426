"""The witness of a simulated fleet sees each promise that is broken."""

from __future__ import annotations

from edgesplit.errors import LinkError
from edgesplit.mqtt import messages
from edgesplit.oip.report import Report
from edgesplit.release.manifest import Signed, Statement
from edgesplit_simulation.invariants.checker import Witness


def _said(counter: int) -> bytes:
    statement = Statement(device="cam", releases=(), counter=counter, expires=0)
    return messages.encode(Signed(messages.encode(statement), ()))


def test_bytes_that_nobody_signed() -> None:
    """A load of anything else than what was signed is told."""
    witness = Witness(signed={"aa"})
    witness.loaded("cam", "aa")
    assert not witness.broken
    witness.loaded("cam", "bb")
    assert "never signed" in witness.broken[0]


def test_a_counter_that_falls() -> None:
    """On the wire and on the device; the same again is no step back."""
    witness = Witness()
    for counter in (5, 5, 7):
        witness.said("edgesplit/v1/cam/desired", _said(counter))
        witness.believed("cam", counter)
    assert not witness.broken
    witness.said("edgesplit/v1/cam/desired", _said(6))
    witness.believed("cam", 6)
    assert len(witness.broken) == 2


def test_requests_have_one_outcome_each() -> None:
    """Lost, late and answered twice are told; an error in time is an outcome."""
    witness, answer = Witness(), Report(release="r", row="local")
    for request in ("in time", "late", "twice", "lost"):
        witness.accepted(request, by=2.0)
    witness.outcome("in time", LinkError("gone"), 1.0)
    witness.overdue(1.5)
    assert not witness.broken

    witness.outcome("late", answer, 2.5)
    witness.outcome("twice", answer, 1.0)
    witness.outcome("twice", answer, 1.0)
    witness.overdue(3.0)
    assert [text.split()[1] for text in witness.broken] == ["late", "twice", "lost"]
