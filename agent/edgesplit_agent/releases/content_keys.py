"""The content keys that this device was given: wrapped on disk and in statements, in clear only in memory."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from edgesplit.crypto.key_file import read_wrapped, write_wrapped
from edgesplit.crypto.key_wrapping import fitting, load_encryption_key, unwrap
from edgesplit.crypto.slice_encryption import Keys, needed_keys
from edgesplit.errors import TrustError
from edgesplit.release.manifest import Manifest, Statement, gateway_slices
from edgesplit_agent.state.data_folder import Identity

log = logging.getLogger(__name__)


class GivenKeys:
    """Keys by release: those of the newest statement, and for what was staged before it those kept beside it."""

    def __init__(self, own_key: Path, identity: Identity, releases: Path) -> None:
        self._own_key = own_key
        self._device = identity.device
        self._releases = releases
        self._said: dict[str, bytes] = {}
        self._said_far: dict[str, bytes] = {}

    def take(self, statement: Statement) -> None:
        """A statement that is believed brings keys for what it wants."""
        self._said = {one.release: one.keys for one in statement.releases if one.keys}
        self._said_far = {one.release: one.keys for one in statement.keeps if one.keys}

    def far(self, release: str, manifest: Manifest) -> Keys:
        """The content keys of what a gateway runs of a release for others; empty where all is in clear. TrustError."""
        needed = needed_keys(manifest, gateway_slices(manifest), golden=False)
        if not needed:
            return {}
        own = load_encryption_key(self._own_key)
        return fitting(unwrap(self._said_far.get(release, b""), own, self._device, release), needed)

    def of(self, release: str, manifest: Manifest, slices: Collection[str]) -> Keys:
        """The content keys of these slices and of the golden inputs; empty where all is in clear.

        TrustError where one was not given, is another, or cannot be unwrapped; UsageError where our own key is lost.
        """
        needed = needed_keys(manifest, slices)
        if not needed:
            return {}
        own = load_encryption_key(self._own_key)
        said, kept = self._said.get(release, b""), read_wrapped(self._releases / release)
        try:
            keys = fitting(unwrap(said or kept, own, self._device, release), needed)
        except TrustError as error:
            if not said or not kept:
                raise
            log.warning("%s; trying the keys that were kept", error)
            return fitting(unwrap(kept, own, self._device, release), needed)
        if said and said != kept:
            self._keep(release, said)
        return keys

    def _keep(self, release: str, wrapped: bytes) -> None:
        """Write down what opens a release that is on disk: the next statement may speak of another one already."""
        home = self._releases / release
        try:
            if home.is_dir():
                write_wrapped(home, wrapped)
        except OSError as error:  # a full disk does not stop what can answer
            log.warning("cannot keep the keys of release %s: %s", release[:12], error.strerror)
