"""Signing on the operator's machine: what the controller prepared is checked first, then signed, then sent back.

Promises: a list of releases is signed only if it is the published one, which this same key signed before, with the one
release that was asked for; a root only if it is the present one with the change that was asked for. Private keys and
passphrases stay here.
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
from edgesplit.release.agent_release import builds, is_agent
from edgesplit.release.manifest import Manifest, decode_manifest, release_digest
from edgesplit_cli.output import size
from edgesplit_cli.settings import PASSPHRASE_VARIABLE, PIN_VARIABLE
from edgesplit_controller.tuf.key_change import (
    DELEGATED,
    KeyChange,
    PublicKey,
    check_root_step,
    check_targets_step,
    parse,
    short,
)
from edgesplit_controller.tuf.signers import NotThisKey, check_signature, sign, signer_uri

_told: dict[str, str] = {}


def ask_secret(name: str, *, new: bool = False) -> str:
    """A passphrase or PIN: from the environment, else from the person at the terminal; a new one twice.

    Each is asked for once in the life of the process.
    """
    if name not in _told:
        variable = PIN_VARIABLE if name.lower() == "pin" else PASSPHRASE_VARIABLE
        given = os.environ.get(variable)
        if not given and not sys.stdin.isatty():
            raise UsageError(f"{name} is needed: set {variable}, or run this in a terminal")
        _told[name] = given or click.prompt(name, hide_input=True, confirmation_prompt=new, err=True)
    return _told[name]


def signed_release(answer: Mapping[str, Any], uris: Sequence[str]) -> str:
    """The list of releases that the controller prepared for one more release, checked and signed, as JSON."""
    manifests = [raw.encode() for raw in answer["manifests"]]
    if [release_digest(raw) for raw in manifests] != [answer["release"]]:
        raise TrustError("the manifest that came is not that of the release: nothing is signed")
    return _signed_list(answer, uris, manifests)


def signed_renewal(answer: Mapping[str, Any], uris: Sequence[str]) -> str:
    """The list of releases as it is, with a later end, checked and signed, as JSON."""
    return _signed_list(answer, uris, [])


def release_told(answer: Mapping[str, Any]) -> list[str]:
    """What is about to be signed, for the operator to read."""
    manifest: Manifest = decode_manifest(answer["manifests"][0].encode())
    if is_agent(manifest):
        return [f"release {answer['release']}", *_agent_told(manifest)]
    plans = [
        f"  plan for {device_class}: "
        + ", ".join(row.name + (f" (after {row.after})" if row.after else "") for row in plan.rows)
        for device_class, plan in manifest.plans.items()
    ]
    servers = sorted({plan.offload for plan in manifest.plans.values() if plan.offload})
    weight = sum(file.bytes for one in manifest.slices for file in one.files)
    return [
        f"release {answer['release']}",
        f"  of {manifest.model} (SHA-256 {manifest.model_sha256}), {len(manifest.slices)} slices, {size(weight)}",
        *plans,
        *(f"  finished by {server}, which is not ours" for server in servers),
    ]


def _agent_told(manifest: Manifest) -> list[str]:
    """Each build with what it can be compared by: `kit.json` of the kit that it was pushed from says the same."""
    return [
        f"  the agent {one.version} for {one.target}, {file.name} of {size(file.bytes)}, SHA-256 {file.sha256}"
        for one in builds(manifest)
        for file in one.slice.files
    ]


def signatures_for(answer: Mapping[str, Any], asked: KeyChange | None, uris: Sequence[str]) -> dict[str, Any]:
    """The body that adds the signatures of these keys to the change that waits; `asked`: the change it must be."""
    try:
        change = msgspec.convert(answer["change"], KeyChange)
        delegates = msgspec.convert(answer["delegates"], dict[str, PublicKey])
    except msgspec.ValidationError as error:
        raise TrustError(f"the controller's change of the keys cannot be read: {error}") from error
    if asked is not None and change != asked:
        raise TrustError("the controller prepared another change than the one asked for: nothing is signed")
    root = parse(answer["root"].encode(), Root, "the root").signed
    following, given_root, given_targets = root, dict[str, Signature](), dict[str, Signature]()
    next_root = parse(answer["next_root"].encode(), Root, "the next root") if answer["next_root"] else None
    if next_root is not None:
        check_root_step(root, next_root.signed, change, time.time())
        following = next_root.signed
    next_targets = None
    if answer["next_targets"]:
        next_targets = parse(answer["next_targets"].encode(), Targets, "the next list of releases")
        _check_list_of_change(answer, change, delegates, next_targets.signed)
    for uri in map(signer_uri, uris):
        others: list[NotThisKey] = []
        found = [
            *_add(given_root, uri, next_root, _keys("root", root, following), others),
            *_add(given_targets, uri, next_targets, _keys("targets", root, following), others),
        ]
        if not found and others:
            raise others[0]
        if not found:
            raise TrustError(
                f"{uri} is no key that this change needs: `edgectl keys show` lists those that are missing"
            )
    return {"root": _sent(given_root), "targets": _sent(given_targets)}


def _check_list_of_change(
    answer: Mapping[str, Any], change: KeyChange, delegates: Mapping[str, PublicKey], following: Targets
) -> None:
    current = parse(answer["targets"].encode(), Targets, "the list of releases").signed
    if set(delegates) != set(change.anew) & set(DELEGATED):
        raise TrustError("the controller names a new key for a role that was not to change: nothing is signed")
    new_keys = {role: key.key() for role, key in delegates.items()}
    replaced = change.release_key is not None or "targets" in change.anew
    check_targets_step(current, following, [], time.time(), delegates=new_keys, replaced=replaced)


def _add(
    given: dict[str, Signature],
    uri: str,
    metadata: Metadata[Any] | None,
    keys: Mapping[str, Key],
    others: list[NotThisKey],
) -> list[Signature]:
    """Sign that part of a change, if the key has a say in it; `others` gets why it has not."""
    try:
        signature = sign(uri, metadata.signed_bytes, keys, ask_secret) if metadata is not None else None
    except NotThisKey as error:
        others.append(error)
        return []
    if signature is None:
        return []
    given[signature.keyid] = signature
    return [signature]


def _signed_list(answer: Mapping[str, Any], uris: Sequence[str], manifests: Sequence[bytes]) -> str:
    root = parse(answer["root"].encode(), Root, "the root").signed
    current = parse(answer["targets"].encode(), Targets, "the list of releases")
    following = parse(answer["next_targets"].encode(), Targets, "the next list of releases")
    try:
        root.verify_delegate("targets", current.signed_bytes, current.signatures)
    except RepositoryError as error:
        raise TrustError(f"the published list of releases is not signed by the release key: {error}") from error
    check_targets_step(current.signed, following.signed, manifests, time.time())
    keys = _keys("targets", root)
    for uri in map(signer_uri, uris):
        signature = sign(uri, following.signed_bytes, keys, ask_secret)
        if signature is None:
            raise TrustError(f"{uri} is not the release key; that is {', '.join(map(short, keys))}")
        if signature.keyid not in current.signatures:
            raise TrustError(f"the published list of releases is not one that {uri} ever signed: nothing is sent")
        check_signature(keys[signature.keyid], current.signatures[signature.keyid], current.signed_bytes)
        following.signatures[signature.keyid] = signature
    return following.to_bytes(JSONSerializer(compact=True)).decode()


def _keys(role: str, *roots: Root) -> dict[str, Key]:
    return {keyid: root.keys[keyid] for root in roots for keyid in root.roles[role].keyids}


def _sent(signatures: Mapping[str, Signature]) -> list[dict[str, str]]:
    return [{"keyid": one.keyid, "sig": one.signature} for one in signatures.values()]
