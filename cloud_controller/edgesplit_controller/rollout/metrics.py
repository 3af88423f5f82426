"""How many rollouts are in which state, and where the devices of those stand that have not ended: for metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from sqlalchemy import func, select

from edgesplit_controller.rollout.states import ENDED, MEMBER_STATES, RolloutState
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow


@dataclass(frozen=True, slots=True)
class Counted:
    """Every state is there, also one that nothing is in: a series that comes and goes hides a zero."""

    rollouts: Mapping[str, int]
    devices: Mapping[str, int]


Count = Callable[[], Counted]


def counting(database: Database) -> Count:
    """Counts them, whenever it is asked."""

    def count() -> Counted:
        rollouts = select(RolloutRow.state, func.count()).group_by(RolloutRow.state)
        going_on = select(RolloutRow.id).where(RolloutRow.state.not_in(sorted(ENDED)))
        devices = select(RolloutDeviceRow.state, func.count()).where(RolloutDeviceRow.rollout.in_(going_on))
        with database.read() as session:
            found = {row[0]: row[1] for row in session.execute(rollouts)}
            standing = {row[0]: row[1] for row in session.execute(devices.group_by(RolloutDeviceRow.state))}
        return Counted(
            {state: found.get(state, 0) for state in get_args(RolloutState)},
            {state: standing.get(state, 0) for state in MEMBER_STATES},
        )

    return count
