"""Counts of rollouts by state, and of devices in unfinished rollouts by state, for Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from sqlalchemy import func, select

from edgesplit_controller.rollout.states import ENDED, MEMBER_STATES, RolloutState
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Counts by state. Every state is present, also with zero, because a time series that disappears hides a zero."""

    rollouts: Mapping[str, int]
    devices: Mapping[str, int]


RolloutCounter = Callable[[], RolloutCounts]


def rollout_counter(database: Database) -> RolloutCounter:
    """A function that counts rollouts and their devices in the database."""

    def count() -> RolloutCounts:
        rollouts = select(RolloutRow.state, func.count()).group_by(RolloutRow.state)
        active = select(RolloutRow.id).where(RolloutRow.state.not_in(sorted(ENDED)))
        devices = select(RolloutDeviceRow.state, func.count()).where(RolloutDeviceRow.rollout.in_(active))
        with database.read() as session:
            rollout_counts = {row[0]: row[1] for row in session.execute(rollouts)}
            device_counts = {row[0]: row[1] for row in session.execute(devices.group_by(RolloutDeviceRow.state))}
        return RolloutCounts(
            {state: rollout_counts.get(state, 0) for state in get_args(RolloutState)},
            {state: device_counts.get(state, 0) for state in MEMBER_STATES},
        )

    return count
