"""Signing on the operator's machine: what the controller prepared is verified first, then signed, then sent back.

A list of releases is signed only if it is the published one, which the same key signed before, with the one requested
release added; a root only if it is the present one with the requested change. Private keys and passphrases stay on this
machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from securesystemslib.signer import Key, Signature
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root, Targets
from tuf.api.serialization.json import JSONSerializer

from edgesplit.errors import TrustError, UsageError
from edgesplit.release.agent_release import agent_builds, is_agent_release
from edgesplit.release.manifest import Manifest, decode_manifest, release_digest
from edgesplit.terminal_text import size
from edgesplit_cli.settings import PASSPHRASE_VARIABLE, PIN_VARIABLE
from edgesplit_controller.tuf.key_change import (
    DELEGATED,
    KeyChange,
    PublicKey,
    check_root_step,
    check_targets_step,
    parse_metadata,
    short_id,
)
from edgesplit_controller.tuf.signers import WrongKey, check_signature, sign, signer_uri

_secrets: dict[str, str] = {}


def ask_secret(name: str, *, new: bool = False) -> str:
    """A passphrase or PIN, from the environment or a prompt; a new one is prompted for twice.

    Each is requested once in the life of the process.
    """
    if name not in _secrets:
        variable = PIN_VARIABLE if name.lower() == "pin" else PASSPHRASE_VARIABLE
        from_environment = os.environ.get(variable)
        if not from_environment and not sys.stdin.isatty():
            raise UsageError(f"{name} is needed: set {variable}, or run this in a terminal")
        _secrets[name] = from_environment or click.prompt(name, hide_input=True, confirmation_prompt=new, err=True)
    return _secrets[name]


def sign_release_list(answer: Mapping[str, Any], uris: Sequence[str]) -> str:
    """Verify and sign the list of releases that the controller prepared for one more release; returns it as JSON."""
    manifests = [raw.encode() for raw in answer["manifests"]]
    if [release_digest(raw) for raw in manifests] != [answer["release"]]:
        raise TrustError("the manifest that came is not that of the release: nothing is signed")
    return _sign_list(answer, uris, manifests)


def sign_renewal(answer: Mapping[str, Any], uris: Sequence[str]) -> str:
    """Verify and sign the unchanged list of releases with a later expiry; returns it as JSON."""
    return _sign_list(answer, uris, [])


def release_summary(answer: Mapping[str, Any]) -> list[str]:
    """What is about to be signed, as lines of text for the operator."""
    manifest: Manifest = decode_manifest(answer["manifests"][0].encode())
    if is_agent_release(manifest):
        return [f"release {answer['release']}", *_agent_summary(manifest)]
    plans = [
        f"  plan for {device_class}: "
        + ", ".join(row.name + (f" (after {row.split_after})" if row.split_after else "") for row in plan.rows)
        for device_class, plan in manifest.plans.items()
    ]
    servers = sorted({plan.offload for plan in manifest.plans.values() if plan.offload})
    total_bytes = sum(file.bytes for slice_ in manifest.slices for file in slice_.files)
    return [
        f"release {answer['release']}",
        f"  of {manifest.model} (SHA-256 {manifest.model_sha256}), {len(manifest.slices)} slices, {size(total_bytes)}",
        *plans,
        *(f"  finished by {server}, which is not ours" for server in servers),
    ]


def _agent_summary(manifest: Manifest) -> list[str]:
    """Each build of the agent with the digest by which it can be compared with `kit.json` of the kit that it was pushed
    from."""
    return [
        f"  the agent {build.version} for {build.target}, {file.name} of {size(file.bytes)}, SHA-256 {file.sha256}"
        for build in agent_builds(manifest)
        for file in build.slice.files
    ]


def signatures_for(answer: Mapping[str, Any], expected: KeyChange | None, uris: Sequence[str]) -> dict[str, Any]:
    """The request body that adds the signatures of these keys to the pending change. `expected` is the change that it
    must be; None accepts any. TrustError where the controller prepared something else."""
    try:
        change = msgspec.convert(answer["change"], KeyChange)
        delegates = msgspec.convert(answer["delegates"], dict[str, PublicKey])
    except msgspec.ValidationError as error:
        raise TrustError(f"the controller's change of the keys cannot be read: {error}") from error
    if expected is not None and change != expected:
        raise TrustError("the controller prepared another change than the one asked for: nothing is signed")
    # A new root must be signed by the keys of the present root and by its own (TUF 5.3.4), so both sets of keys may
    # sign; each URI signs whatever parts of the change its key belongs to.
    root = parse_metadata(answer["root"].encode(), Root, "the root").signed
    following, given_root, given_targets = root, dict[str, Signature](), dict[str, Signature]()
    next_root = parse_metadata(answer["next_root"].encode(), Root, "the next root") if answer["next_root"] else None
    if next_root is not None:
        check_root_step(root, next_root.signed, change, time.time())
        following = next_root.signed
    next_targets = None
    if answer["next_targets"]:
        next_targets = parse_metadata(answer["next_targets"].encode(), Targets, "the next list of releases")
        _check_list_of_change(answer, change, delegates, next_targets.signed)
    for uri in map(signer_uri, uris):
        others: list[WrongKey] = []
        added = [
            *_add_signature(given_root, uri, next_root, _keys("root", root, following), others),
            *_add_signature(given_targets, uri, next_targets, _keys("targets", root, following), others),
        ]
        if not added and others:
            raise others[0]
        if not added:
            raise TrustError(
                f"{uri} is no key that this change needs: `edgectl keys show` lists those that are missing"
            )
    return {"root": _to_dicts(given_root), "targets": _to_dicts(given_targets)}


def _check_list_of_change(
    answer: Mapping[str, Any], change: KeyChange, delegates: Mapping[str, PublicKey], following: Targets
) -> None:
    current = parse_metadata(answer["targets"].encode(), Targets, "the list of releases").signed
    if set(delegates) != set(change.anew) & set(DELEGATED):
        raise TrustError("the controller names a new key for a role that was not to change: nothing is signed")
    new_keys = {role: key.to_key() for role, key in delegates.items()}
    replaced = change.release_key is not None or "targets" in change.anew
    check_targets_step(current, following, [], time.time(), delegates=new_keys, replaced=replaced)


def _add_signature(
    signatures: dict[str, Signature],
    uri: str,
    metadata: Metadata[Any] | None,
    keys: Mapping[str, Key],
    others: list[WrongKey],
) -> list[Signature]:
    """Sign one part of a change if the key belongs to its role; `others` receives the reason where it does not."""
    try:
        signature = sign(uri, metadata.signed_bytes, keys, ask_secret) if metadata is not None else None
    except WrongKey as error:
        others.append(error)
        return []
    if signature is None:
        return []
    signatures[signature.keyid] = signature
    return [signature]


def _sign_list(answer: Mapping[str, Any], uris: Sequence[str], manifests: Sequence[bytes]) -> str:
    root = parse_metadata(answer["root"].encode(), Root, "the root").signed
    current = parse_metadata(answer["targets"].encode(), Targets, "the list of releases")
    following = parse_metadata(answer["next_targets"].encode(), Targets, "the next list of releases")
    try:
        root.verify_delegate("targets", current.signed_bytes, current.signatures)
    except RepositoryError as error:
        raise TrustError(f"the published list of releases is not signed by the release key: {error}") from error
    check_targets_step(current.signed, following.signed, manifests, time.time())
    keys = _keys("targets", root)
    for uri in map(signer_uri, uris):
        signature = sign(uri, following.signed_bytes, keys, ask_secret)
        if signature is None:
            raise TrustError(f"{uri} is not the release key; that is {', '.join(map(short_id, keys))}")
        # The published list must carry a valid signature by this very key: otherwise a controller could present a
        # list that this operator never signed and have it signed now.
        if signature.keyid not in current.signatures:
            raise TrustError(f"the published list of releases is not one that {uri} ever signed: nothing is sent")
        check_signature(keys[signature.keyid], current.signatures[signature.keyid], current.signed_bytes)
        following.signatures[signature.keyid] = signature
    return following.to_bytes(JSONSerializer(compact=True)).decode()


def _keys(role: str, *roots: Root) -> dict[str, Key]:
    return {keyid: root.keys[keyid] for root in roots for keyid in root.roles[role].keyids}


def _to_dicts(signatures: Mapping[str, Signature]) -> list[dict[str, str]]:
    return [{"keyid": signature.keyid, "sig": signature.signature} for signature in signatures.values()]
