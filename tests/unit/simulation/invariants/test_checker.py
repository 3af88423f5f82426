"""The invariant checker of a simulated fleet detects each violation."""

from __future__ import annotations

from edgesplit.errors import LinkError
from edgesplit.mqtt import messages
from edgesplit.oip.report import Report
from edgesplit.release.manifest import Signed, Statement
from edgesplit_simulation.invariants.checker import InvariantChecker


def _said(counter: int) -> bytes:
    statement = Statement(device="cam", releases=(), counter=counter, expires=0)
    return messages.encode(Signed(messages.encode(statement), ()))


def test_loading_unsigned_bytes_violates_an_invariant() -> None:
    """Loading anything else than what was signed is reported."""
    witness = InvariantChecker(signed_files={"aa"})
    witness.on_file_loaded("cam", "aa")
    assert not witness.violations
    witness.on_file_loaded("cam", "bb")
    assert "never signed" in witness.violations[0]


def test_a_falling_counter_violates_an_invariant() -> None:
    """On the wire and on the device; a repeated value is allowed."""
    witness = InvariantChecker()
    for counter in (5, 5, 7):
        witness.on_published("edgesplit/v1/cam/desired", _said(counter))
        witness.on_statement_accepted("cam", counter)
    assert not witness.violations
    witness.on_published("edgesplit/v1/cam/desired", _said(6))
    witness.on_statement_accepted("cam", 6)
    assert len(witness.violations) == 2


def test_requests_have_exactly_one_outcome() -> None:
    """Lost, late and duplicate answers are reported; an error in time is an outcome."""
    witness, answer = InvariantChecker(), Report(release="r", row="local")
    for request in ("in time", "late", "twice", "lost"):
        witness.on_request(request, deadline=2.0)
    witness.on_outcome("in time", LinkError("gone"), 1.0)
    witness.check_overdue(1.5)
    assert not witness.violations

    witness.on_outcome("late", answer, 2.5)
    witness.on_outcome("twice", answer, 1.0)
    witness.on_outcome("twice", answer, 1.0)
    witness.check_overdue(3.0)
    assert [text.split()[1] for text in witness.violations] == ["late", "twice", "lost"]
