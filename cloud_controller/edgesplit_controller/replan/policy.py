"""What the controller may do by itself when a plan grows old: `auto`, `propose` (where nobody said otherwise), `off`.

A policy is of a model, of a group of devices, or of both; the narrower one counts, and a model's before a group's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import select

from edgesplit.errors import UsageError
from edgesplit_controller.replan.decide import Doubt
from edgesplit_controller.storage.database import Database, record
from edgesplit_controller.storage.tables.replan import PolicyRow

Mode = Literal["auto", "propose", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What may be done, and how sure the controller must be."""

    mode: Mode = "propose"
    doubt: Doubt = Doubt()
    group: str = ""
    """Whose policy it is; empty: that of every group."""


Key = tuple[str, str]
"""Model (its name) and group; empty for every one."""


def effective(policies: Mapping[Key, Policy], model: str, group: str) -> Policy:
    """The policy for a model on a device of that group."""
    keys = ((model, group), (model, ""), ("", group), ("", ""))
    return next((policies[key] for key in keys if key in policies), Policy())


class Policies:
    """The policies of one installation."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[Key, Policy]:
        """Every policy that was set."""
        with self._database.read() as session:
            rows = session.scalars(select(PolicyRow).order_by(PolicyRow.model, PolicyRow.group)).all()
        return {(row.model, row.group): _policy(row) for row in rows}

    def set(
        self, model: str, groups: Sequence[str], changes: Mapping[str, Any], now: float, who: str = "operator"
    ) -> list[dict[str, Any]]:
        """Change what is given of a model's policy (`mode`, or fields of `Doubt`), for these groups or for all; the
        policies as they are then. UsageError for what no policy has."""
        for group in groups or ("",):
            with self._database.write() as session:
                row = session.get(PolicyRow, (model, group))
                before = _policy(row) if row is not None else effective(self.all(), model, group)
                made = changed(before, changes)
                doubt = msgspec.to_builtins(made.doubt)
                session.merge(PolicyRow(model=model, group=group, mode=made.mode, doubt=doubt, changed=now))
                record(session, now, who, "replan.policy", model or "all models", group=group, mode=made.mode, **doubt)
        return [shown(key, policy) for key, policy in self.all().items() if key[0] == model]


def changed(policy: Policy, changes: Mapping[str, Any]) -> Policy:
    """A policy with some of it changed; UsageError where that is none."""
    given = {name: value for name, value in changes.items() if value is not None}
    mode = given.pop("mode", policy.mode)
    try:
        doubt = msgspec.convert({**msgspec.to_builtins(policy.doubt), **given}, Doubt)
        return msgspec.convert({"mode": mode, "doubt": doubt, "group": policy.group}, Policy)
    except msgspec.ValidationError as error:
        raise UsageError(f"not a policy: {error}") from error


def shown(key: Key, policy: Policy) -> dict[str, Any]:
    """A policy for people and scripts."""
    model, group = key
    return {"model": model or None, "group": group or None, "mode": policy.mode, **msgspec.to_builtins(policy.doubt)}


def _policy(row: PolicyRow) -> Policy:
    return Policy(mode=msgspec.convert(row.mode, Mode), doubt=msgspec.convert(row.doubt, Doubt), group=row.group)
