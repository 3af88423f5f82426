"""A small signed world for tests: a repository with a clock of its own, devices that trust it, and tiny releases."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from edgesplit.plan import Link, Plan, Row
from edgesplit.release import manifest as release
from edgesplit.release.manifest import Chunk, DesiredRelease, Manifest, Slice, SliceFile, Statement, TensorSpec
from edgesplit.trust.store import TrustStore
from edgesplit_controller.tuf.repository import Repository

START = 1_750_000_000.0
DAY = 86_400.0
DEVICE = "cam-1"
TENSOR = TensorSpec("x", "FP32", (1, 4))


def slice_of(name: str, files: dict[str, list[bytes]]) -> Slice:
    """A slice whose files are these chunks."""
    described = tuple(
        SliceFile(
            file, sum(map(len, pieces)), hashlib.sha256(b"".join(pieces)).hexdigest(), tuple(map(chunk_of, pieces))
        )  # type: ignore[arg-type]
        for file, pieces in files.items()
    )
    return Slice(name, "onnx", (name,), (TENSOR,), (TENSOR,), described)


def chunk_of(data: bytes) -> Chunk:
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


def sample_release(version: int = 1) -> tuple[bytes, dict[str, bytes]]:
    """A manifest's bytes, and its chunks by digest. Versions share the weights of `head`."""
    parts = {
        "head": {"graph.onnx": [b"head graph"], "weights.bin": [b"w" * 1000, b"v" * 500]},
        "tail": {"graph.onnx": [f"tail graph {version}".encode()]},
    }
    link = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.04)
    rows = (Row(name="cut-1", device=("head",), remote=("tail",)), Row(name="local", device=("head", "tail")))
    manifest = Manifest(
        model=f"tiny@{version}",
        model_sha256="0" * 64,
        created="2025-06-15T00:00:00Z",
        input_spec=None,
        inputs=(TENSOR,),
        outputs=(TENSOR,),
        slices=tuple(slice_of(name, files) for name, files in parts.items()),
        plans={"pi4": Plan(model=f"tiny@{version}", device_class="pi4", rows=rows, link=link)},
    )
    pieces = [piece for files in parts.values() for chunks in files.values() for piece in chunks]
    return release.encode_manifest(manifest), {hashlib.sha256(piece).hexdigest(): piece for piece in pieces}


class TrustHarness:
    """One repository, and stores that fetch from it through `fetch`, which a test may twist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = START
        self.counter = 0
        self.repository = self.reopened()
        self.bootstrap = self.repository.root_bytes
        self.twist: Callable[[str, bytes], bytes] = lambda path, raw: raw
        self.fetched: list[str] = []

    def reopened(self) -> Repository:
        """The repository as a new process sees it."""
        return Repository(self.folder / "repository", now=self.clock)

    def clock(self) -> float:
        return self.now

    def store(self, name: str = DEVICE) -> TrustStore:
        """A store as a new process of that device sees it."""
        return TrustStore(self.folder / name, self.bootstrap, now=self.clock)

    def fetch(self, path: str, max_bytes: int) -> bytes:
        self.fetched.append(path)
        return self.twist(path, self.repository.read(path))

    def add(self, version: int = 1) -> str:
        return self.repository.add_release(sample_release(version)[0])

    def state(self, device: str = DEVICE, *, counter: int, digest: str = "", lasts_s: float = DAY) -> bytes:
        """The director's signed word for `device`."""
        wanted = (DesiredRelease("tiny", digest),) if digest else ()
        return self.repository.sign_statement(
            Statement(device=device, releases=wanted, counter=counter, expires=int(self.now + lasts_s))
        )

    def backup(self) -> Path:
        """A copy of the repository as it is."""
        return Path(shutil.copytree(self.folder / "repository", self.folder / f"backup-{len(self.fetched)}"))

    def restore(self, backup: Path) -> None:
        shutil.rmtree(self.folder / "repository")
        shutil.copytree(backup, self.folder / "repository")
        self.repository = self.reopened()


def refreshed(world: TrustHarness) -> TrustStore:
    """A store of the device that has just refreshed."""
    store = world.store()
    store.refresh(world.fetch)
    return store
