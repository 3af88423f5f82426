"""Encrypted slices: ciphertext decrypts to the plaintext, and nothing that was changed, moved, left out or swapped
does."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.crypto.key_file import write_keys
from edgesplit.crypto.key_wrapping import (
    decode_keys,
    load_encryption_key,
    load_or_make_encryption_key,
    public_bytes,
    select_keys,
    sign_encryption_key,
    unwrap,
    verify_encryption_key,
    wrap,
)
from edgesplit.crypto.slice_encryption import (
    ContentKey,
    SliceInMemory,
    decrypt_slice,
    decrypting_chunk_source,
    derive_slice_key,
    encrypt_golden,
    encrypt_slice,
    needed_keys,
)
from edgesplit.errors import EdgeError, MalformedMessage, TrustError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.release.manifest import (
    TAG_BYTES,
    EncryptionInfo,
    GoldenExample,
    Manifest,
    Slice,
    SliceFile,
    decode_manifest,
    encode_manifest,
    release_digest,
)
from edgesplit.release_store import StoredRelease, open_release, write_release
from edgesplit.trust.identity import certificate_request
from edgesplit_offload.server import release_opener
from support.signed_repository import TrustHarness, chunk_of, sample_release, slice_of

SECRET, OTHER_SECRET = b"s" * 32, b"t" * 32
GRAPH, WEIGHTS = b"the graph", [b"w" * 1000, b"v" * 500, b"u" * 70]
PLAIN = slice_of("head", {"graph.onnx": [GRAPH], "weights.bin": WEIGHTS})
RUNS = {"graph.onnx": [GRAPH], "weights.bin": WEIGHTS}
FILES = {name: b"".join(runs) for name, runs in RUNS.items()}
SLICE, SEALED_RUNS = encrypt_slice(PLAIN, RUNS, SECRET)
CIPHERTEXT = {name: b"".join(runs) for name, runs in SEALED_RUNS.items()}
KEY = derive_slice_key(PLAIN, SECRET)
KEYS = {KEY.key_id: KEY.secret}
DEVICE, RELEASE = "cam-1", "ab" * 32
OWN = X25519PrivateKey.generate()


def opened(slice_: Slice, files: dict[str, bytes], keys: dict[str, bytes] = KEYS) -> dict[str, bytes]:
    """The slice's files in clear."""
    with decrypt_slice(slice_, lambda file: io.BytesIO(files[file.name]), keys) as memory:
        return {file.name: memory.read(file.name) for file in slice_.files}


def test_encrypted_slice_round_trips() -> None:
    """Every file comes back byte for byte, and none of its ciphertext contains any of its plaintext."""
    assert opened(SLICE, CIPHERTEXT) == FILES
    assert all(run not in CIPHERTEXT["weights.bin"] for run in (b"wwww", b"vvvv", b"uuuu"))
    assert [chunk.bytes for chunk in SLICE.files[1].chunks] == [len(run) + TAG_BYTES for run in WEIGHTS]


def test_equal_slices_have_equal_ciphertext() -> None:
    """A second deployment resends nothing; another controller, another byte or another name give other ciphertext."""
    again, runs = encrypt_slice(PLAIN, RUNS, SECRET)
    assert again == SLICE and {name: b"".join(one) for name, one in runs.items()} == CIPHERTEXT
    assert SEALED_RUNS["weights.bin"][-1] == SEALED_RUNS["weights.bin"][2]
    chunks = {chunk.sha256 for file in SLICE.files for chunk in file.chunks}
    changed = slice_of("head", {"graph.onnx": [GRAPH], "weights.bin": [*WEIGHTS[:2], b"U" * 70]})
    others = [
        encrypt_slice(PLAIN, RUNS, OTHER_SECRET),
        encrypt_slice(changed, {**RUNS, "weights.bin": [*WEIGHTS[:2], b"U" * 70]}, SECRET),
        encrypt_slice(msgspec.structs.replace(PLAIN, name="tail"), RUNS, SECRET),
    ]
    for other, _ in others:
        assert other.encryption is not None and other.encryption.key_id != KEY.key_id
        assert chunks.isdisjoint(chunk.sha256 for file in other.files for chunk in file.chunks)


def test_equal_chunks_have_different_ciphertext() -> None:
    """Each chunk has a nonce of its own: two layers of zeros do not show as two equal chunks."""
    twin = slice_of("zeros", {"weights.bin": [bytes(640)] * 4, "graph.onnx": [bytes(640)]})
    sealed, _ = encrypt_slice(twin, {"weights.bin": [bytes(640)] * 4, "graph.onnx": [bytes(640)]}, SECRET)
    assert len({chunk.sha256 for file in sealed.files for chunk in file.chunks}) == 5


@pytest.mark.parametrize("file", ["graph.onnx", "weights.bin"])
def test_every_flipped_byte_is_refused(file: str) -> None:
    """A bit flipped anywhere in the ciphertext, tags included, makes decryption fail."""
    good = CIPHERTEXT[file]
    for at in range(len(good)):
        bad = good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
        with pytest.raises(TrustError):
            opened(SLICE, {**CIPHERTEXT, file: bad})


def described(files: dict[str, list[bytes]]) -> tuple[Slice, dict[str, bytes]]:
    """The sealed slice with these chunks in place of its own, as somebody who can sign would describe them."""
    listed = tuple(
        msgspec.structs.replace(
            file,
            bytes=sum(map(len, files[file.name])),
            sha256=hashlib.sha256(b"".join(files[file.name])).hexdigest(),
            chunks=tuple(map(chunk_of, files[file.name])),
        )
        for file in SLICE.files
    )
    return msgspec.structs.replace(SLICE, files=listed), {name: b"".join(runs) for name, runs in files.items()}


def runs_of(slice_: Slice, files: dict[str, bytes]) -> dict[str, list[bytes]]:
    """A slice's chunks, by file."""
    found: dict[str, list[bytes]] = {}
    for file in slice_.files:
        source = io.BytesIO(files[file.name])
        found[file.name] = [source.read(chunk.bytes) for chunk in file.chunks]
    return found


def swapped_slices() -> dict[str, list[bytes]]:
    """The graph of another slice under the same secret."""
    _, other = encrypt_slice(msgspec.structs.replace(PLAIN, name="tail"), RUNS, SECRET)
    return {**runs_of(SLICE, CIPHERTEXT), "graph.onnx": list(other["graph.onnx"])}


GOOD = runs_of(SLICE, CIPHERTEXT)
CHANGES: dict[str, Callable[[], dict[str, list[bytes]]]] = {
    "two chunks change places": lambda: {**GOOD, "weights.bin": [GOOD["weights.bin"][place] for place in (1, 0, 2)]},
    "the last chunk is left out": lambda: {**GOOD, "weights.bin": GOOD["weights.bin"][:2]},
    "the first chunk is left out": lambda: {**GOOD, "weights.bin": GOOD["weights.bin"][1:]},
    "a chunk comes twice": lambda: {**GOOD, "weights.bin": [*GOOD["weights.bin"], GOOD["weights.bin"][2]]},
    "a chunk is cut short": lambda: {**GOOD, "graph.onnx": [GOOD["graph.onnx"][0][:-1]]},
    "a chunk is only a part of a tag": lambda: {**GOOD, "graph.onnx": [GOOD["graph.onnx"][0][:5]]},
    "a file is empty": lambda: {**GOOD, "weights.bin": []},
    "the files change places": lambda: {"graph.onnx": GOOD["weights.bin"], "weights.bin": GOOD["graph.onnx"]},
    "a file is another slice's": swapped_slices,
}


@pytest.mark.parametrize("change", CHANGES)
def test_moved_ciphertext_is_refused(change: str) -> None:
    """Also where the manifest describes the wrong bytes correctly: the key's holder detects it."""
    with pytest.raises(TrustError):
        opened(*described(CHANGES[change]()))


def test_slice_decrypts_only_with_its_own_key() -> None:
    """No key, another slice's, one bit off, short: TrustError, and the plaintext's digest tells a guesser nothing."""
    wrong = bytes([KEY.secret[0] ^ 1]) + KEY.secret[1:]
    for keys in ({}, {KEY.key_id: wrong}, {KEY.key_id: b""}, {KEY.key_id: KEY.secret[:31]}, {"0" * 64: KEY.secret}):
        with pytest.raises(TrustError, match="content key"):
            opened(SLICE, CIPHERTEXT, keys)
    assert SLICE.files[0].plaintext is not None
    assert SLICE.files[0].plaintext.digest != hashlib.sha256(GRAPH).hexdigest()
    assert KEY.secret.hex() not in repr(KEY) and KEY.secret.hex() not in repr(SLICE)


def test_decrypted_files_are_sealed_memory_files() -> None:
    """Writing, growing and shrinking are refused, and closing frees them."""
    memory = decrypt_slice(SLICE, lambda file: io.BytesIO(CIPHERTEXT[file.name]), KEYS)
    path = memory.path("weights.bin")
    assert path.read_bytes() == FILES["weights.bin"] and "memfd:" in os.readlink(path)
    for change in (lambda file: file.write(b"x"), lambda file: file.truncate(1)):
        with pytest.raises(PermissionError), open(path, "r+b", buffering=0) as file:
            change(file)
    view = memory.map_file("weights.bin")
    memory.close()
    assert view is not None and bytes(view) == FILES["weights.bin"] and memory.map_file("nothing") is None


def test_out_of_memory_is_a_transient_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the plaintext is an error that may pass, not one of trust; nothing half decrypted stays."""
    before = len(os.listdir("/proc/self/fd"))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("memfd_create", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(EdgeError, match=r"no memory to decrypt head/graph\.onnx") as told:
                opened(SLICE, CIPHERTEXT)
        assert not isinstance(told.value, TrustError)
    assert len(os.listdir("/proc/self/fd")) == before


def test_golden_inputs_decrypt_only_with_their_key_and_place() -> None:
    """Pictures are encrypted too; a request and a response cannot be mixed up."""
    sealed, bodies = encrypt_golden([b"request", b"response"], SECRET)
    stored = {chunk_of(body).sha256: body for body in bodies}
    pair = GoldenExample(chunk_of(bodies[0]), chunk_of(bodies[1]), sealed)
    keys = {sealed.key_id: ContentKey.from_key_id(SECRET, sealed.key_id).secret}
    manifest = msgspec.structs.replace(decode_manifest(sample_release()[0]), golden=(pair,))
    chunk = decrypting_chunk_source(manifest, keys, stored.__getitem__)
    assert [chunk(one.sha256) for one in (pair.request, pair.response)] == [b"request", b"response"]
    mixed = msgspec.structs.replace(manifest, golden=(GoldenExample(pair.response, pair.request, sealed),))
    for wrong in (
        decrypting_chunk_source(manifest, {}, stored.__getitem__),
        decrypting_chunk_source(mixed, keys, stored.__getitem__),
    ):
        with pytest.raises(TrustError):
            wrong(pair.request.sha256)


# Manifests and releases on disk


def sealed_release() -> tuple[bytes, dict[str, bytes], dict[str, bytes]]:
    """The sample release encrypted: manifest, chunks by digest, content keys."""
    raw, chunks = sample_release()
    manifest, keys, stored, slices = decode_manifest(raw), {}, {}, []
    for slice_ in manifest.slices:
        runs = {file.name: [chunks[chunk.sha256] for chunk in file.chunks] for file in slice_.files}
        sealed, contents = encrypt_slice(slice_, runs, SECRET)
        key = derive_slice_key(slice_, SECRET)
        keys[key.key_id] = key.secret
        slices.append(sealed)
        stored.update({chunk_of(run).sha256: run for closed in contents.values() for run in closed})
    return encode_manifest(msgspec.structs.replace(manifest, slices=tuple(slices))), stored, keys


def test_release_on_disk_is_ciphertext(tmp_path: Path) -> None:
    """The files hold no weight; they are verified as signed at each load, and decrypted in memory only with keys."""
    raw, chunks, keys = sealed_release()
    world = TrustHarness(tmp_path / "world")
    digest = world.repository.add_release(raw)
    proof = world.repository.proof(digest)
    folder = tmp_path / "releases"
    release = write_release(folder, digest, raw, proof, chunks.__getitem__, bootstrap_root=world.bootstrap)
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"w" * 64 not in on_disk and b"head graph" not in on_disk
    assert release.has_slices({"head", "tail"}) and release.manifest.is_encrypted
    with pytest.raises(TrustError, match="was not given its content key"):
        release.slice_folder("head")
    with replace(release, keys=keys).slice_folder("head") as memory:
        assert memory.read("weights.bin") == b"w" * 1000 + b"v" * 500
    spoiled = release.folder / "slices" / "head" / "weights.bin"
    spoiled.write_bytes(spoiled.read_bytes()[::-1])
    with pytest.raises(TrustError, match="not the one that was signed"):
        replace(open_release(folder, digest, world.bootstrap), keys=keys).slice_folder("head")


def test_offload_server_needs_valid_keys(tmp_path: Path) -> None:
    """Its keys file missing, corrupt or another's: TrustError names the file; once repaired, the next request
    decrypts."""
    raw, chunks, keys = sealed_release()
    world = TrustHarness(tmp_path / "world")
    digest = world.repository.add_release(raw)
    folder = tmp_path / "releases"
    home = write_release(
        folder, digest, raw, world.repository.proof(digest), chunks.__getitem__, bootstrap_root=world.bootstrap
    ).folder
    open_ = release_opener(folder, world.bootstrap)
    with pytest.raises(TrustError, match=r"keys\.json cannot be read"):
        open_(digest)
    for spoiled in (b"", b"{}", b"[]", b'{"a": 1}', msgspec.json.encode(dict.fromkeys(keys, b"x" * 32))):
        (home / "keys.json").write_bytes(spoiled)
        with pytest.raises(TrustError):
            open_(digest)
    write_keys(home, keys)
    assert (home / "keys.json").stat().st_mode & 0o777 == 0o600
    source = open_(digest).slice_folder("tail")
    assert isinstance(source, SliceInMemory) and source.read("graph.onnx") == b"tail graph 1"
    with pytest.raises(TrustError, match="was not given its content key"):
        open_(digest).slice_folder("head")  # no row runs it remotely: its key is not for this machine


def test_slice_of_another_release_is_refused(tmp_path: Path) -> None:
    """The same layers in a later version of the model have another key."""
    runs = {"graph.onnx": [b"tail graph 2"]}
    other, closed = encrypt_slice(slice_of("tail", runs), runs, SECRET)
    files = {name: b"".join(one) for name, one in closed.items()}
    raw, _, keys = sealed_release()
    tail = decode_manifest(raw).slice("tail")
    assert isinstance(StoredRelease(decode_manifest(raw), release_digest(raw), tmp_path), StoredRelease)
    with pytest.raises(TrustError):
        opened(tail, files, keys)
    with pytest.raises(TrustError):
        opened(other, files, keys)


Twist = Callable[[Slice], Slice]
FIRST = SLICE.files[0]


def with_file(**changes: object) -> Twist:
    return lambda one: msgspec.structs.replace(
        one, files=(msgspec.structs.replace(one.files[0], **changes), *one.files[1:])
    )


CONTRADICTIONS: dict[str, Twist] = {
    "a plaintext size that does not fit": with_file(plaintext=msgspec.structs.replace(FIRST.plaintext, bytes=8)),
    "no plaintext size": with_file(plaintext=None),
    "a digest that is none": with_file(plaintext=msgspec.structs.replace(FIRST.plaintext, digest="x")),
    "a key id that is none": lambda one: msgspec.structs.replace(
        one, encryption=EncryptionInfo("chacha20-poly1305", "../x", "0" * 64)
    ),
    "a commitment that is none": lambda one: msgspec.structs.replace(
        one, encryption=EncryptionInfo("chacha20-poly1305", "0" * 64, "")
    ),
    "a file in clear with a plaintext": lambda one: msgspec.structs.replace(one, encryption=None),
    "a chunk that is only a tag": with_file(
        bytes=16, chunks=(chunk_of(b"t" * 16),), plaintext=msgspec.structs.replace(FIRST.plaintext, bytes=0)
    ),
}


@pytest.mark.parametrize("twist", CONTRADICTIONS)
def test_inconsistent_manifest_is_refused(twist: str) -> None:
    """Sizes, digests and encryption fields of slices must agree, or the manifest is malformed."""
    manifest = decode_manifest(sealed_release()[0])
    slices = tuple(
        CONTRADICTIONS[twist](msgspec.structs.replace(SLICE, name=slice_.name)) if slice_.name == "head" else slice_
        for slice_ in manifest.slices
    )
    with pytest.raises(MalformedMessage):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, slices=slices)))


def test_encrypted_chunks_may_be_larger_by_one_tag() -> None:
    """The largest plaintext chunk is still one chunk when encrypted, and no larger one is allowed."""
    run = b"z" * LIMITS.chunk_bytes
    sealed, _ = encrypt_slice(slice_of("head", {"graph.onnx": [run]}), {"graph.onnx": [run]}, SECRET)
    manifest = decode_manifest(sealed_release()[0])

    def decoded(one: Slice) -> Manifest:
        tail = manifest.slice("tail")
        return decode_manifest(encode_manifest(msgspec.structs.replace(manifest, slices=(one, tail))))

    assert decoded(sealed).slice("head") == sealed
    too_long = SliceFile("graph.onnx", len(run) + 1, "0" * 64, (chunk_of(run + b"z"),))
    with pytest.raises(MalformedMessage):
        decoded(msgspec.structs.replace(sealed, files=(too_long,), encryption=None))


# Keys for one device


def test_keys_unwrap_only_for_their_device_and_release() -> None:
    """Another device's key, name or release: TrustError; two wrappings of the same keys differ."""
    wrapped = wrap(KEYS, public_bytes(OWN), DEVICE, RELEASE)
    assert unwrap(wrapped, OWN, DEVICE, RELEASE) == KEYS
    assert wrap(KEYS, public_bytes(OWN), DEVICE, RELEASE) != wrapped
    for key, device, release in (
        (X25519PrivateKey.generate(), DEVICE, RELEASE),
        (OWN, "cam-2", RELEASE),
        (OWN, DEVICE, "cd" * 32),
    ):
        with pytest.raises(TrustError, match="not wrapped for this device"):
            unwrap(wrapped, key, device, release)
    with pytest.raises(TrustError, match="no content keys came"):
        unwrap(b"", OWN, DEVICE, RELEASE)


def test_every_corrupt_wrapping_is_refused() -> None:
    """Each byte flipped, each prefix, trailing bytes, and more than any device needs."""
    wrapped = wrap(KEYS, public_bytes(OWN), DEVICE, RELEASE)
    spoiled = [wrapped[:at] + bytes([wrapped[at] ^ 1 << at % 8]) + wrapped[at + 1 :] for at in range(len(wrapped))]
    spoiled += [wrapped[:at] for at in range(len(wrapped))]
    spoiled += [wrapped + b"!", bytes(LIMITS.wrapped_bytes + 1), bytes(len(wrapped))]
    for bad in spoiled:
        with pytest.raises(TrustError):
            unwrap(bad, OWN, DEVICE, RELEASE)


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.binary(max_size=300), st.dictionaries(st.text(max_size=70), st.binary(max_size=40))))
def test_unwrapping_gives_valid_keys_or_a_trust_error(said: bytes | dict[str, bytes]) -> None:
    """Whatever content was wrapped: keys of the right length, or a TrustError."""
    raw = said if isinstance(said, bytes) else msgspec.msgpack.encode({"keys": said})
    try:
        keys = decode_keys(raw)
    except TrustError:
        return
    assert all(isinstance(name, str) and len(key) == 32 for name, key in keys.items())


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_do_not_unwrap(raw: bytes) -> None:
    """Whatever a broker sends in place of wrapped keys is a TrustError."""
    with pytest.raises(TrustError):
        unwrap(raw, OWN, DEVICE, RELEASE)


def test_keys_must_match_the_manifests_commitments() -> None:
    """Missing, swapped and foreign keys are detected before anything is fetched or loaded."""
    raw, _, keys = sealed_release()
    needed = needed_keys(decode_manifest(raw), ["head", "tail"])
    assert select_keys({**keys, "0" * 64: b"x" * 32}, needed) == keys
    first, second = needed
    with pytest.raises(TrustError, match="1 of 2 content keys"):
        select_keys({first: keys[first]}, needed)
    with pytest.raises(TrustError, match="2 of 2 content keys"):
        select_keys({first: keys[second], second: keys[first]}, needed)


def test_wrapping_too_many_keys_is_refused() -> None:
    """At the operator's side, not on a device."""
    rng = random.Random(7)
    many = {f"{number:064x}": rng.randbytes(32) for number in range(1_000)}
    with pytest.raises(UsageError, match="fewer cuts"):
        wrap(many, public_bytes(OWN), DEVICE, RELEASE)


# The device's own key


def test_encryption_key_is_created_once_and_private(tmp_path: Path) -> None:
    """Created at enrolment, mode 0600; the same one ever after."""
    path = tmp_path / "identity" / "encryption.pem"
    made = load_or_make_encryption_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (
        public_bytes(load_or_make_encryption_key(path)) == public_bytes(made) == public_bytes(load_encryption_key(path))
    )


@pytest.mark.parametrize("content", [None, b"", b"rubbish"])
def test_lost_encryption_key_is_reported_with_advice(tmp_path: Path, content: bytes | None) -> None:
    """It is never silently created anew, since the controller wraps for the old one. A corrupt one is not overwritten
    either."""
    path = tmp_path / "encryption.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="--replace"):
        load_encryption_key(path)
    if content is not None:
        with pytest.raises(UsageError, match="--replace"):
            load_or_make_encryption_key(path)
        assert path.read_bytes() == content


def test_encryption_key_needs_its_owners_signature() -> None:
    """Bound to the certificate request by the request's own key; points of low order are no keys."""
    identity, thief = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    csr = certificate_request(identity, DEVICE).decode()
    public, signature = sign_encryption_key(OWN, identity, csr)
    verify_encryption_key(public, signature, identity.public_key(), csr, DEVICE)
    other = public_bytes(X25519PrivateKey.generate())
    for key, signed, asked in (
        (other, signature, csr),
        (public, sign_encryption_key(OWN, thief, csr)[1], csr),
        (public, signature, certificate_request(identity, "cam-2").decode()),
    ):
        with pytest.raises(TrustError, match="not signed"):
            verify_encryption_key(key, signed, identity.public_key(), asked, DEVICE)
    for point in (bytes(32), b"\1" + bytes(31)):
        signed = identity.sign(b"edgesplit encryption key 1\n" + point + csr.encode())
        with pytest.raises(MalformedMessage, match="no X25519 key"):
            verify_encryption_key(point, signed, identity.public_key(), csr, DEVICE)
    with pytest.raises(MalformedMessage):
        verify_encryption_key(public[:31], signature, identity.public_key(), csr, DEVICE)
