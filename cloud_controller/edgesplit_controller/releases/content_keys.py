"""Content keys of encrypted releases: derived from one secret of this installation, and wrapped to the devices that run
the slices.

The secret is stored in `keys/content.key` (0600). A content key is derived from it and the encrypted content. So no key
is stored in the database, the same slice gives the same ciphertext again, and a backup of that file opens every
release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from cryptography import x509

from edgesplit.crypto.key_wrapping import verify_encryption_key, wrap
from edgesplit.crypto.slice_encryption import (
    ContentKey,
    encrypt_golden,
    encrypt_slice,
    is_key_of,
    needed_keys,
)
from edgesplit.errors import TrustError, UsageError
from edgesplit.release.manifest import (
    EncryptionInfo,
    Manifest,
    device_slices,
    gateway_slices,
    remote_slices,
)
from edgesplit_controller.errors import Conflict, Unauthenticated
from edgesplit_controller.model_registry.golden import GoldenPair
from edgesplit_controller.pki.secret_file import load_or_make_secret
from edgesplit_controller.storage.tables.core import Device
from edgesplit_partitioner.slicing import CutSlice


class ContentKeys:
    """The content keys of one installation."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(
        self, manifest: Manifest, contents: Sequence[CutSlice], pairs: Sequence[GoldenPair]
    ) -> tuple[Manifest, list[CutSlice], list[GoldenPair]]:
        """Encrypt every slice and golden pair of a release: the new manifest, and the contents to store."""
        sealed = [CutSlice(*encrypt_slice(piece.slice, piece.runs, self._secret)) for piece in contents]
        by_name = {piece.slice.name: piece.slice for piece in sealed}
        bodies = [body for pair in pairs for body in (pair.request, pair.response)]
        golden_seal, bodies = encrypt_golden(bodies, self._secret)
        pairs = [
            replace(pair, request=request, response=response)
            for pair, request, response in zip(pairs, bodies[::2], bodies[1::2], strict=True)
        ]
        encrypted = msgspec.structs.replace(
            manifest,
            slices=tuple(by_name[piece.name] for piece in manifest.slices),
            compiled=tuple(
                msgspec.structs.replace(piece, slice=by_name[piece.slice.name]) for piece in manifest.compiled
            ),
            golden=tuple(pair.to_example(golden_seal) for pair in pairs),
        )
        return encrypted, sealed, pairs

    def keys_for(self, manifest: Manifest, needed: Mapping[str, EncryptionInfo]) -> dict[str, bytes]:
        """These content keys by id; Conflict if the release was encrypted with another secret."""
        keys = {key_id: ContentKey.from_key_id(self._secret, key_id).secret for key_id in needed}
        if not all(is_key_of(sealed, keys[key_id]) for key_id, sealed in needed.items()):
            raise Conflict(
                f"{manifest.model}: keys/content.key is not the secret that this release was encrypted with: restore it"
                " from a backup, or deploy the model again"
            )
        return keys

    def remote_keys(self, manifest: Manifest) -> dict[str, bytes]:
        """Keys for the offload server: those of every slice that some row runs there."""
        return self.keys_for(manifest, needed_keys(manifest, remote_slices(manifest), golden=False))

    def wrap_for_device(self, device: Device, release: str, manifest: Manifest) -> bytes:
        """Keys of the slices that this device runs, wrapped to its public key; empty for a release in clear."""
        plan = manifest.plans.get(device.device_class)
        if not manifest.is_encrypted or plan is None:
            return b""
        check_can_decrypt([device])
        keys = self.keys_for(manifest, needed_keys(manifest, device_slices(plan, manifest)))
        return wrap(keys, device.encryption_key, device.name, release)

    def wrap_for_gateway(self, gateway: Device, release: str, manifest: Manifest) -> bytes:
        """Keys of the slices that a gateway runs, wrapped to its public key; empty for a release in clear."""
        if not manifest.is_encrypted:
            return b""
        check_can_decrypt([gateway])
        keys = self.keys_for(manifest, needed_keys(manifest, gateway_slices(manifest), golden=False))
        return wrap(keys, gateway.encryption_key, gateway.name, release)


def load_or_make_content_keys(path: Path) -> ContentKeys:
    """The keys derived from the secret in `path`, which is created if there is none; UsageError if it is corrupt."""
    hint = "restore it from a backup; without one move it away, and deploy encrypted models again"
    return ContentKeys(load_or_make_secret(path, hint))


def check_can_decrypt(devices: Iterable[Device]) -> None:
    """Check that each of these devices has a public key to wrap to; Conflict names those that have none."""
    without = sorted(device.name for device in devices if not device.encryption_key)
    if without:
        raise Conflict(
            f"{', '.join(without)}: enrolled without an encryption key, so nothing can be encrypted for it; claim it"
            " anew (`edgectl device claim NAME --replace`), or deploy in clear"
        )


def check_key_ownership(csr_pem: str, encryption_key: bytes, signature: bytes) -> None:
    """Check that the owner of the certificate request owns that encryption key. UsageError for a malformed request,
    Forbidden for a wrong signature."""
    try:
        owner = x509.load_pem_x509_csr(csr_pem.encode()).public_key()
        verify_encryption_key(encryption_key, signature, owner, csr_pem, "the device")
    except ValueError as error:
        raise UsageError(f"not a certificate request: {error}") from error
    except TrustError as error:
        raise Unauthenticated(str(error)) from error
