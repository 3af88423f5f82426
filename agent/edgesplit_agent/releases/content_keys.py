"""The content keys that this device was given for encrypted slices: wrapped on disk and in statements, in clear only in
memory."""

from __future__ import annotations

import logging
from collections.abc import Collection

from edgesplit.crypto.key_file import read_wrapped_keys, write_wrapped_keys
from edgesplit.crypto.key_wrapping import load_encryption_key, select_keys, unwrap
from edgesplit.crypto.slice_encryption import Keys, needed_keys
from edgesplit.errors import TrustError
from edgesplit.release.manifest import Manifest, Statement, gateway_slices
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)


class ContentKeys:
    """Content keys by release: those of the newest statement, and for releases staged before it those stored beside
    them."""

    def __init__(self, folder: DataFolder, identity: Identity) -> None:
        self._own_key = folder.encryption_key_file
        self._device = identity.device
        self._releases = folder.releases
        self._wrapped_own: dict[str, bytes] = {}
        self._wrapped_gateway: dict[str, bytes] = {}

    def use_statement(self, statement: Statement) -> None:
        """Adopt the wrapped keys of an accepted statement."""
        self._wrapped_own = {wanted.release: wanted.keys for wanted in statement.releases if wanted.keys}
        self._wrapped_gateway = {wanted.release: wanted.keys for wanted in statement.gateway_releases if wanted.keys}

    def for_gateway(self, release: str, manifest: Manifest) -> Keys:
        """The content keys of the slices that this gateway runs for other devices; empty where none is encrypted.
        TrustError where one was not given or cannot be unwrapped."""
        needed = needed_keys(manifest, gateway_slices(manifest), golden=False)
        if not needed:
            return {}
        own = load_encryption_key(self._own_key)
        return select_keys(unwrap(self._wrapped_gateway.get(release, b""), own, self._device, release), needed)

    def for_device(self, release: str, manifest: Manifest, slices: Collection[str]) -> Keys:
        """The content keys of these slices and of the golden inputs; empty where none is encrypted.

        TrustError where one was not given, is the wrong one, or cannot be unwrapped; UsageError where this device's own
        key is lost.
        """
        needed = needed_keys(manifest, slices)
        if not needed:
            return {}
        own = load_encryption_key(self._own_key)
        from_statement, stored = self._wrapped_own.get(release, b""), read_wrapped_keys(self._releases / release)
        try:
            keys = select_keys(unwrap(from_statement or stored, own, self._device, release), needed)
        except TrustError as error:
            if not from_statement or not stored:
                raise
            log.warning("%s; trying the stored keys", error)
            return select_keys(unwrap(stored, own, self._device, release), needed)
        if from_statement and from_statement != stored:
            self._store(release, from_statement)
        return keys

    def _store(self, release: str, wrapped: bytes) -> None:
        """Store the wrapped keys beside the release on disk: the next statement may contain those of another release
        only."""
        home = self._releases / release
        try:
            if home.is_dir():
                write_wrapped_keys(home, wrapped)
        except OSError as error:  # a full disk must not stop a release that can answer
            log.warning("cannot store the keys of release %s: %s", release[:12], error.strerror)
