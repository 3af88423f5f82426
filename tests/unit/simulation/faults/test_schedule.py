"""A faults file is validated before anything begins."""

from __future__ import annotations

import pytest

from edgesplit.errors import UsageError
from edgesplit_simulation.faults.schedule import USUAL_FAULTS, parse_faults


def _file(line: str) -> bytes:
    return f"format: edgesplit.faults/1\nfaults:\n  - {line}\n".encode()


def test_fault_quantities_are_parsed() -> None:
    """Spans in seconds, shares as parts of one, rates per second."""
    (fault,) = parse_faults(_file("{what: offline, devices: 20%, rate: 0.5/d, for: 5m-6h}"))

    assert (fault.kind, fault.share, fault.duration_range_s) == ("offline", 0.2, (300.0, 21_600.0))
    assert fault.rate_per_s == pytest.approx(0.5 / 86_400)


def test_the_example_month_of_faults_parses() -> None:
    """It contains every kind."""
    assert len({fault.kind for fault in parse_faults(USUAL_FAULTS)}) == 15


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{what: offline}", "exactly one of at"),
        ("{what: offline, at: 1h, rate: 1/d}", "exactly one of at"),
        ("{what: meteor, at: 1h}", "meteor"),
        ("{what: offline, at: soon}", "not a duration"),
        ("{what: offline, at: 1h, for: 2h-1h}", "begins with the longer"),
        ("{what: offline, rate: 0/d}", "above 0"),
        ("{what: offline, rate: often}", "not a rate"),
        ("{what: offline, at: 1h, devices: 120%}", "not a percentage"),
        ("{what: revoked, at: 1h, for: 1h}", "has no duration"),
        ("{what: offline, at: 1h, how: crash}", "a release only"),
        ("{what: power cut, at: 1h, forget: true}", "a broker restart only"),
        ("{what: power cut, at: 1h, by: 1h}", "`by` applies to"),
        ("{what: slow link, at: 1h, by: fast}", "not a rate"),
        ("{what: offline, at: 1h, colour: red}", "colour"),
    ],
)
def test_an_error_names_its_fault(line: str, says: str) -> None:
    """The fault with the error is named."""
    with pytest.raises(UsageError, match=says):
        parse_faults(_file(line))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"format: edgesplit.faults/2\nfaults: []", b"\xff\xfe", b"a: [", b"- " * 9]
)
def test_an_invalid_faults_file_is_refused(raw: bytes) -> None:
    """Nothing in it is executed."""
    with pytest.raises(UsageError, match=r"docs/simulation\.md"):
        parse_faults(raw)
