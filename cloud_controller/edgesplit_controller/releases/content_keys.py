"""Content keys of encrypted releases: made from one secret of this installation, and handed to who runs the slices.

The secret lies in `keys/content.key` (0600). A content key follows from it and what is encrypted, so none is kept in
the database, the same slice is the same ciphertext again, and a backup of that file opens every release.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from cryptography import x509

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.key_wrapping import check_introduction, wrap
from edgesplit.crypto.slice_encryption import KEY_BYTES, ContentKey, is_key_of, needed_keys, seal_golden, seal_slice
from edgesplit.errors import TrustError, UsageError
from edgesplit.release.manifest import Chunk, Golden, Manifest, Sealed, device_slices, gateway_slices, remote_slices
from edgesplit_controller.errors import Conflict, Forbidden
from edgesplit_controller.model_registry.golden import GoldenPair
from edgesplit_controller.storage.database import Device
from edgesplit_partitioner.slicing import CutSlice


class ContentKeys:
    """The content keys of one installation."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(
        self, manifest: Manifest, contents: Sequence[CutSlice], pairs: Sequence[GoldenPair]
    ) -> tuple[Manifest, list[CutSlice], list[GoldenPair]]:
        """The release with every slice and golden input encrypted, and what is to be kept of it."""
        sealed = [CutSlice(*seal_slice(one.slice, one.runs, self._secret)) for one in contents]
        by_name = {one.slice.name: one.slice for one in sealed}
        bodies = [body for pair in pairs for body in (pair.request, pair.response)]
        golden_seal, bodies = seal_golden(bodies, self._secret)
        pairs = [GoldenPair(*bodies[at : at + 2]) for at in range(0, len(bodies), 2)]
        encrypted = msgspec.structs.replace(
            manifest,
            slices=tuple(by_name[one.name] for one in manifest.slices),
            compiled=tuple(msgspec.structs.replace(one, slice=by_name[one.slice.name]) for one in manifest.compiled),
            golden=tuple(Golden(_chunk(pair.request), _chunk(pair.response), golden_seal) for pair in pairs),
        )
        return encrypted, sealed, pairs

    def keys_for(self, manifest: Manifest, needed: Mapping[str, Sealed]) -> dict[str, bytes]:
        """These content keys; Conflict where our secret is not the one that the release was encrypted with."""
        keys = {key_id: ContentKey.named(self._secret, key_id).secret for key_id in needed}
        if not all(is_key_of(sealed, keys[key_id]) for key_id, sealed in needed.items()):
            raise Conflict(
                f"{manifest.model}: keys/content.key is not the secret that this release was encrypted with: restore it"
                " from a backup, or deploy the model again"
            )
        return keys

    def remote_keys(self, manifest: Manifest) -> dict[str, bytes]:
        """What the offload server needs: the keys of every slice that some row runs there."""
        return self.keys_for(manifest, needed_keys(manifest, remote_slices(manifest), golden=False))

    def wrapped(self, device: Device, release: str, manifest: Manifest) -> bytes:
        """The keys of what this device runs of a release, wrapped to it; empty where all of it is in clear."""
        plan = manifest.plans.get(device.device_class)
        if not manifest.is_encrypted or plan is None:
            return b""
        check_can_decrypt([device])
        keys = self.keys_for(manifest, needed_keys(manifest, device_slices(plan, manifest)))
        return wrap(keys, device.encryption_key, device.name, release)

    def wrapped_far(self, gateway: Device, release: str, manifest: Manifest) -> bytes:
        """The keys of what a gateway runs of a release, wrapped to it; empty where all of it is in clear."""
        if not manifest.is_encrypted:
            return b""
        check_can_decrypt([gateway])
        keys = self.keys_for(manifest, needed_keys(manifest, gateway_slices(manifest), golden=False))
        return wrap(keys, gateway.encryption_key, gateway.name, release)


def load_or_make_content_keys(path: Path) -> ContentKeys:
    """The keys of the secret in `path`, which is made there if there is none; UsageError where it is spoiled."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = secrets.token_bytes(KEY_BYTES)
        write_durably(path, secret, mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(secret) != KEY_BYTES:
        raise UsageError(
            f"{path} is spoiled ({len(secret)} bytes instead of {KEY_BYTES}): restore it from a backup; without one"
            " move it away, and deploy encrypted models again"
        )
    if path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)
    return ContentKeys(secret)


def check_can_decrypt(devices: Iterable[Device]) -> None:
    """Each of these devices has a key of its own to wrap to; Conflict names those that have not."""
    without = sorted(device.name for device in devices if not device.encryption_key)
    if without:
        raise Conflict(
            f"{', '.join(without)}: enrolled without an encryption key, so nothing can be encrypted for it; claim it"
            " anew (`edgectl device claim NAME --replace`), or deploy in clear"
        )


def check_introduced(csr_pem: str, encryption_key: bytes, signature: bytes) -> None:
    """Whoever made the request owns that encryption key; MalformedMessage or Forbidden otherwise."""
    try:
        owner = x509.load_pem_x509_csr(csr_pem.encode()).public_key()
        check_introduction(encryption_key, signature, owner, csr_pem, "the device")
    except ValueError as error:
        raise UsageError(f"not a certificate request: {error}") from error
    except TrustError as error:
        raise Forbidden(str(error)) from error


def _chunk(data: bytes) -> Chunk:
    return Chunk(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
