"""Replanning policies: what the controller may do by itself when a plan no longer fits: `auto`, `propose` (the default)
or `off`.

A policy applies to a model, to a group of devices, or to both. The narrower one wins, and a model's before a group's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import select

from edgesplit.errors import UsageError
from edgesplit_controller.replan.decide import ConfidencePolicy
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.replan import PolicyRow

Mode = Literal["auto", "propose", "off"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller may do, and the confidence it needs."""

    mode: Mode = "propose"
    doubt: ConfidencePolicy = ConfidencePolicy()
    group: str = ""
    """The group to which the policy applies; empty: every group."""


Key = tuple[str, str]
"""Model name and group; empty for all of them."""


def effective_policy(policies: Mapping[Key, Policy], model: str, group: str) -> Policy:
    """The policy that applies to a model on a device of that group."""
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
        """Change fields of a model's policy (`mode`, or fields of `ConfidencePolicy`), for these groups or for all.
        Returns the model's policies afterwards; UsageError for an unknown field or a value out of range."""
        for group in groups or ("",):
            with self._database.write() as session:
                row = session.get(PolicyRow, (model, group))
                before = _policy(row) if row is not None else effective_policy(self.all(), model, group)
                updated = with_changes(before, changes)
                doubt = msgspec.to_builtins(updated.doubt)
                session.merge(PolicyRow(model=model, group=group, mode=updated.mode, doubt=doubt, changed=now))
                record_event(
                    session, now, who, "replan.policy", model or "all models", group=group, mode=updated.mode, **doubt
                )
        return [policy_view(key, policy) for key, policy in self.all().items() if key[0] == model]


def with_changes(policy: Policy, changes: Mapping[str, Any]) -> Policy:
    """The policy with some fields changed; UsageError for an unknown field or a value out of range."""
    fields = {name: value for name, value in changes.items() if value is not None}
    mode = fields.pop("mode", policy.mode)
    try:
        doubt = msgspec.convert({**msgspec.to_builtins(policy.doubt), **fields}, ConfidencePolicy)
        return msgspec.convert({"mode": mode, "doubt": doubt, "group": policy.group}, Policy)
    except msgspec.ValidationError as error:
        raise UsageError(f"not a policy: {error}") from error


def policy_view(key: Key, policy: Policy) -> dict[str, Any]:
    """A policy as JSON."""
    model, group = key
    return {"model": model or None, "group": group or None, "mode": policy.mode, **msgspec.to_builtins(policy.doubt)}


def _policy(row: PolicyRow) -> Policy:
    return Policy(
        mode=msgspec.convert(row.mode, Mode), doubt=msgspec.convert(row.doubt, ConfidencePolicy), group=row.group
    )
