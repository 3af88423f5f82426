"""The errors this project raises on purpose, sorted by who must act.

A library's error is translated where it enters; `exit_code` is what a command ends with when the error
reaches it, and is part of the command line's contract.
"""

from __future__ import annotations


class EdgeError(Exception):
    """Everything edgesplit raises on purpose."""

    exit_code = 1


class UsageError(EdgeError):
    """The caller asked for something that cannot be: a typo, an unknown name, a missing file."""

    exit_code = 2


class ModelRefused(EdgeError):
    """This model file cannot be taken; the text says why and what would do."""

    exit_code = 3


class InfeasibleLimits(EdgeError):
    """No cut satisfies the limits; the text names those that conflict."""

    exit_code = 4


class LinkError(EdgeError):
    """The network failed. The same call may succeed later."""

    exit_code = 5


class TrustError(EdgeError):
    """The other side must not be believed. Keep the version that runs; never retry."""

    exit_code = 6


class Expired(TrustError):
    """It was true and is too old to install anything by, or this clock is wrong. Keep what runs; ask again later."""


class MalformedMessage(EdgeError):
    """Bytes no correct peer would send."""

    exit_code = 7


class DeadlineExceeded(EdgeError):
    """No answer by the request's deadline; none will follow."""

    exit_code = 8


class InferenceFailed(EdgeError):
    """The model was reached and could not answer: wrong shape, wrong name, a runtime that failed."""

    exit_code = 9


class Busy(LinkError):
    """The other side has no room just now (HTTP 429 or 503)."""

    retry_after_s: float = 0.0
    """How long it asks to be left alone; 0 where it did not say."""


class Crowding(Busy):
    """This client asks for more than its share while others wait (HTTP 429)."""


class Dropped(EdgeError):
    """Another frame took this request's place, or it found none, as its application asked. Never retry it."""

    exit_code = 10


class MediumFailed(EdgeError):
    """A card, stick or disk did not take or give back what was written to it: it is not usable as it is."""

    exit_code = 15


class Interrupted(EdgeError):
    """Work was ended from outside before it was done, which says nothing about what was worked on. Ask again."""

    exit_code = 16


class NotFound(UsageError):
    """No such model, version or release here (HTTP 404)."""
