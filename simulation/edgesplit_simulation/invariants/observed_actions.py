"""The agent's update actions, observed: accepted statements are reported to the invariant checker."""

from __future__ import annotations

from typing import Any

from edgesplit.release.manifest import Statement
from edgesplit_agent.updates.actions import DeviceUpdateActions
from edgesplit_simulation.invariants.checker import InvariantChecker


class ObservedUpdateActions(DeviceUpdateActions):
    """Carries out the steps as the agent does."""

    def __init__(self, device: str, checker: InvariantChecker, *arguments: Any, **options: Any) -> None:
        """`device` is the name in reports of the checker; the other arguments are those of the agent's actions."""
        super().__init__(*arguments, **options)
        self._device, self._checker = device, checker

    def accept_statement(self, raw: bytes) -> Statement:
        """Accept a statement and report it to the checker."""
        statement = super().accept_statement(raw)
        self._checker.on_statement_accepted(self._device, statement.counter)
        return statement
