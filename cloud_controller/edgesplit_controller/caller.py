"""Who asks something of the controller: an operator with a role, over some groups of devices or over all.

What a caller may is decided here and nowhere else; how it is found out who calls is `api.access`'s.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from edgesplit.errors import UsageError

OWNER = "operator"
"""The operator who owns the data folder: made at the first start, an admin of everything, without an end."""
_asking: ContextVar[str] = ContextVar("asking", default=OWNER)


class Role(enum.IntEnum):
    """What an operator may: each what those before it may, and more."""

    VIEWER = 1
    """Read."""
    OPERATOR = 2
    """Change models, devices and deployments."""
    ADMIN = 3
    """Change operators; where it is of all groups: keys too."""

    @classmethod
    def parse(cls, word: str) -> Role:
        """The role of that name; UsageError lists them."""
        try:
            return cls[word.upper()] if word.islower() else cls[""]
        except KeyError:
            raise UsageError(f"no role {word[:40]!r}: viewer, operator or admin") from None

    @property
    def word(self) -> str:
        """As people write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who was let in."""

    operator: str
    role: Role
    groups: frozenset[str] | None = None
    """Groups of devices that exist for this caller; None: all."""
    serial: str = ""
    """Of the certificate that was shown; empty for a browser's session."""
    address: str = ""

    @property
    def everywhere(self) -> bool:
        """Are all groups this caller's?"""
        return self.groups is None

    def sees(self, group: str) -> bool:
        """Does a device of that group exist for this caller?"""
        return self.groups is None or group in self.groups

    def covers(self, groups: Iterable[str] | None) -> bool:
        """Are all of these this caller's? None stands for all there are and will be."""
        return self.groups is None or (groups is not None and self.groups.issuperset(groups))


def asks(operator: str) -> None:
    """From here on, in this request, it is this operator who asks."""
    _asking.set(operator)


def who_asks() -> str:
    """The operator for whom this is done; the data folder's owner where nobody asked."""
    return _asking.get()
