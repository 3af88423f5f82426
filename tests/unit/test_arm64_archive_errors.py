"""The message of `make test-arm64` when Debian's archive gives nothing: the cause, and advice."""

from __future__ import annotations

import pytest

from arm64.debian import why_not_fetched


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("E: Failed to fetch http://deb/pool/q.deb  429  Too Many Requests [IP: 10.0.0.1 80]", "limits"),
        ("Err:2 http://deb trixie InRelease\n  403  Forbidden [IP: 10.0.0.1 80]", "refuses"),
        ("  503  Service Unavailable", "refuses"),
        ("Err:1 http://deb bookworm InRelease\n  Temporary failure resolving 'deb'", "cannot be reached"),
        ("W: Could not connect to deb:80 (10.0.0.1). - connect (111: Connection refused)", "cannot be reached"),
    ],
)
def test_an_unavailable_mirror_is_reported_as_such(said: str, told: str) -> None:
    """Before apt's own message; a repeated run resumes with the files at hand."""
    assert told in why_not_fetched(said) and "run it again later" in why_not_fetched(said)


@pytest.mark.parametrize("said", ["dpkg: error processing package 5.2", "E: Sub-process exited unexpectedly (1)", ""])
def test_other_failures_are_not_blamed_on_the_mirror(said: str) -> None:
    """Then apt's message stands alone."""
    assert why_not_fetched(said) == ""
