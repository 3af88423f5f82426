"""Wraps the update actions of a device and reports accepted statements to the invariant checker."""

from __future__ import annotations

from collections.abc import Callable

from edgesplit.mqtt.messages import ModelState
from edgesplit.release.manifest import Statement
from edgesplit_agent.updates.reconciler import InstalledState, ReleaseProgress, UpdateActions
from edgesplit_simulation.invariants.checker import InvariantChecker


class ObservedUpdateActions:
    """The reconciler's update actions, passed on to `actions`; accepted statements are also reported to the checker."""

    def __init__(self, actions: UpdateActions, device: str, checker: InvariantChecker) -> None:
        self._actions, self._device, self._checker = actions, device, checker
        self.fetch_manifest = actions.fetch_manifest
        self.apply_bundle_at = actions.apply_bundle_at
        self.stage, self.verify, self.activate = actions.stage, actions.verify, actions.activate
        self.reverify, self.commit, self.roll_back = actions.reverify, actions.commit, actions.roll_back
        self.mark_start_healthy, self.retire, self.collect_garbage = (
            actions.mark_start_healthy,
            actions.retire,
            actions.collect_garbage,
        )

    def accept_statement(self, raw: bytes) -> Statement:
        """Pass on; a statement that is accepted is reported to the checker."""
        statement = self._actions.accept_statement(raw)
        self._checker.on_statement_accepted(self._device, statement.counter)
        return statement

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Pass on."""
        return self._actions.fetch_missing(release, superseded)

    def installed(self) -> InstalledState:
        """Pass on."""
        return self._actions.installed()

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str,
        trouble: str,
        kept: tuple[ModelState, ...],
    ) -> None:
        """Pass on."""
        self._actions.report(counter, models, safe_mode, trouble, kept)

    def progress(self, release: str) -> ReleaseProgress:
        """Pass on."""
        return self._actions.progress(release)
