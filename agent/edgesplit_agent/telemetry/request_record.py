"""The record of one finished request, and the interface of everything that counts requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from edgesplit.errors import Dropped, Unsure, UsageError
from edgesplit.oip.report import Report, phases
from edgesplit.runtime import Timing
from edgesplit_agent.releases.loaded_release import LoadedRelease

APPLICATION_ERRORS = (UsageError, Dropped, Unsure)
"""Errors that are the application's fault, or its wish: neither the model nor the device failed."""


@dataclass(frozen=True)
class RequestRecord:
    """Everything known of one finished request."""

    model: str
    release: LoadedRelease
    """The release with which it began."""
    outcome: Report | Exception | None
    """The answer's report (row, fallback, phases, bytes, energy), or the error; an application that got a stale answer
    instead has its error here.

    None: no request of its own, only runs on the device: they ended after their request did, or belong to a direct
    request that is repeated through the agent.
    """
    device_runs: tuple[Exception | None, ...] = ()
    """Result of each run of the release's own slices on this device: None, or the error."""
    timing: Timing | None = None
    """Measured times of the slices; None where the device's part did not succeed."""
    is_direct: bool = False
    """Whether it was answered over a lane, past the agent."""

    @property
    def is_application_error(self) -> bool:
        """Whether the request failed by the application's fault, such as a picture that cannot be decoded."""
        return isinstance(self.outcome, APPLICATION_ERRORS)

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """Seconds of each phase of an answered request; empty for others."""
        return phases(self.outcome) if isinstance(self.outcome, Report) else {}


class RequestObserver(Protocol):
    """Counts requests, or learns from them."""

    def finished(self, record: RequestRecord) -> None:
        """A request has finished. Called once per record, in order, after the answer was sent."""


@dataclass(frozen=True)
class DeviceRunObserver:
    """Passes on the result of each run of a release's own slices: release digest, and None or the error."""

    on_run: Callable[[str, Exception | None], None]

    def finished(self, record: RequestRecord) -> None:
        """Pass on the runs of one request."""
        for error in record.device_runs:
            self.on_run(record.release.digest, error)
