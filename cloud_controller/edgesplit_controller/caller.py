"""The authenticated caller of a request: an operator with a role, limited to some groups of devices or to none.

What a caller may do is decided here; `access.authenticator` finds out which operator calls.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from edgesplit.errors import UsageError

OWNER = "operator"
"""Name of the operator that owns the data folder: created at the first start, admin of all groups, never expires."""
_current_operator: ContextVar[str] = ContextVar("asking", default=OWNER)


class Role(enum.IntEnum):
    """Role of an operator; each role includes the permissions of the lower ones."""

    VIEWER = 1
    """May read."""
    OPERATOR = 2
    """May also change models, devices and deployments."""
    ADMIN = 3
    """May also change operators and, if not limited to some groups, the signing keys."""

    @classmethod
    def parse(cls, word: str) -> Role:
        """The role with this lower-case name; UsageError, naming the valid roles, for any other text."""
        try:
            return cls[word.upper()] if word.islower() else cls[""]
        except KeyError:
            raise UsageError(f"no role {word[:40]!r}: viewer, operator or admin") from None

    @property
    def word(self) -> str:
        """The role's name in lower case, as the command line and the API spell it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    """An operator that was authenticated."""

    operator: str
    role: Role
    groups: frozenset[str] | None = None
    """Groups of devices that are visible to this caller; None: all groups."""
    serial: str = ""
    """Serial number of the client certificate; empty for a browser session."""
    address: str = ""

    def covers(self, groups: Iterable[str] | None) -> bool:
        """Whether all of these groups are the caller's. `groups=None` stands for every group, present and future."""
        return self.groups is None or (groups is not None and self.groups.issuperset(groups))


def set_current_operator(operator: str) -> None:
    """Set the operator on whose behalf the rest of this request (this context) runs."""
    _current_operator.set(operator)


def current_operator() -> str:
    """The operator on whose behalf the current context runs; `OWNER` outside of a request."""
    return _current_operator.get()
