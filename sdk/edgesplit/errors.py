"""The errors that edgesplit raises on purpose, grouped by the action they require.

Errors of third-party libraries are translated where they enter. `exit_code` is the exit status of a command that ends
with the error; it is part of the command line's contract.
"""

from __future__ import annotations


class EdgeError(Exception):
    """Base class of every error that edgesplit raises on purpose."""

    exit_code = 1


class UsageError(EdgeError):
    """The caller's request cannot be fulfilled: a typo, an unknown name, a missing file."""

    exit_code = 2


class ModelRefused(EdgeError):
    """The model file is not supported; the text gives the reason and what would be accepted."""

    exit_code = 3


class InfeasibleLimits(EdgeError):
    """No cut satisfies the limits; the text names the conflicting ones."""

    exit_code = 4


class LinkError(EdgeError):
    """The network failed. The same call may succeed later."""

    exit_code = 5


class Unreachable(LinkError):
    """No process listens at the address, or this user may not connect to it: the connection was refused, or there is no
    such socket."""


class TrustError(EdgeError):
    """Verification of the peer or its data failed. Keep the running version; never retry."""

    exit_code = 6


class Expired(TrustError):
    """The metadata or statement was valid but is too old to install anything by, or this machine's clock is wrong. Keep
    the running version; fetch again later."""


class MalformedMessage(EdgeError):
    """Bytes that no correct peer sends."""

    exit_code = 7


class DeadlineExceeded(EdgeError):
    """No answer arrived before the request's deadline; none will follow."""

    exit_code = 8


class InferenceFailed(EdgeError):
    """The model was reached but could not compute an answer: wrong shape, wrong name, or a runtime failure."""

    exit_code = 9


class Busy(LinkError):
    """The server has no capacity now (HTTP 429 or 503)."""

    retry_after_s: float = 0.0
    """Seconds after which to retry, as requested by the server; 0 where it gave none."""


class FairShareExceeded(Busy):
    """This client exceeds its fair share while other clients wait (HTTP 429)."""


class Dropped(EdgeError):
    """The request was superseded by another frame, or found no room in the queue, as its application requested. Never
    retry."""

    exit_code = 10


class MediumFailed(EdgeError):
    """A card, stick or disk failed to store or to return the data written to it: the medium is not usable as it is."""

    exit_code = 15


class Interrupted(EdgeError):
    """The operation was stopped from outside before it finished; its input may be fine. Retry."""

    exit_code = 16


class Unsure(EdgeError):
    """A cascade has only an unsure answer, because its second variant could not be asked in time, and the request
    refuses such answers. The same call may succeed later."""

    exit_code = 17


class NotFound(UsageError):
    """No such model, version or release here (HTTP 404)."""


def kind_of(error: EdgeError) -> str:
    """Name of the nearest class in this module, by which `of_kind` makes the error again elsewhere."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def of_kind(name: str, default: type[EdgeError] = EdgeError) -> type[EdgeError]:
    """The class of this name in this module; `default` if there is none."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, EdgeError) else default
