"""An offload server as its real processes, on a signed release of the handmade slices; and clients that keep asking."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO

import msgspec
import numpy as np

from edgesplit.client.connection import Connection, Reply
from edgesplit.errors import LinkError, MalformedMessage
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Chunk, SliceFile, encode_manifest
from edgesplit.release_store import write_release
from edgesplit_controller.tuf.repository import Repository
from support.handmade_release import DEVICE_CLASS, MID, graph_bytes, make_manifest

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Signed:
    """A release on disk, and what its cut is asked by."""

    releases: Path
    root: Path
    model: str


def signed_release(folder: Path) -> Signed:
    """The handmade release, signed by a repository of its own."""
    plain = make_manifest()
    graphs = {one.name: graph_bytes(one) for one in plain.slices}
    chunks = {hashlib.sha256(raw).hexdigest(): raw for raw in graphs.values()}
    sha_of = {name: hashlib.sha256(raw).hexdigest() for name, raw in graphs.items()}
    files = {
        name: (SliceFile("graph.onnx", len(raw), sha_of[name], (Chunk(sha_of[name], len(raw)),)),)
        for name, raw in graphs.items()
    }
    slices = tuple(msgspec.structs.replace(one, files=files[one.name]) for one in plain.slices)
    raw = encode_manifest(msgspec.structs.replace(plain, slices=slices))
    repository = Repository(folder / "repository")
    digest = repository.add_release(raw)
    root = folder / "root.json"
    root.write_bytes(repository.root_bytes)
    write_release(
        folder / "releases", digest, raw, repository.proof(digest), chunks.__getitem__,
        bootstrap_root=repository.root_bytes,
    )  # fmt: skip
    return Signed(folder / "releases", root, oip.remote_name(digest, DEVICE_CLASS, "cut-1"))


class Serving:
    """`python -m edgesplit_offload.main` on a signed release; ended by leaving the block."""

    def __init__(self, signed: Signed, *options: object, stderr: IO[str] | None = None) -> None:
        self.model = signed.model
        words = ["--releases", signed.releases, "--root", signed.root, "--port", 0, "--log", "warning", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgesplit_offload.main", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert "listening on" in line, line
        self.port = int(line.rpartition(":")[2])

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def workers(self) -> list[int]:
        """Numbers of the serving processes that live."""
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(one) for file in found for one in file.read_text().split() if not _is_dead(int(one)))

    def ask(self, connection: Connection, value: int = 1) -> Reply:
        """One inference: `value` in, twice of it expected."""
        buffers, length = oip.encode_request(oip.InferRequest({"mid": np.full_like(MID, value)}))
        headers = {oip.HEADER_LENGTH: str(length)}
        path = f"/v2/models/{self.model}/infer"
        return connection.exchange("POST", path, deadline=monotonic() + PATIENCE_S, headers=headers, body=buffers)

    def answer(self, value: int = 1) -> list[float]:
        """By a connection of its own."""
        with closing(Connection("127.0.0.1", self.port)) as connection:
            return outputs(self.ask(connection, value))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def outputs(reply: Reply) -> list[float]:
    """What was answered; an AssertionError for anything but an answer."""
    assert reply.status == 200, bytes(reply.body)
    out: list[float] = oip.decode_response(reply.body, oip.header_length(reply.headers)).outputs["out"].ravel().tolist()
    return out


@dataclass
class Askers:
    """Clients that ask without a pause, each on one connection for as long as it holds."""

    serving: Serving
    count: int
    answered: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """Connections of each that broke."""
    wrong: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answered, self.broken, self.refused = ([0] * self.count for _ in range(3))
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(self.count)]

    def start(self) -> Askers:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self, number: int) -> None:
        while not self._ending.is_set():
            try:
                with closing(Connection("127.0.0.1", self.serving.port)) as connection:
                    self._keep_asking(number, connection)
            except ConnectionRefusedError:
                self.refused[number] += 1
                return
            except (LinkError, MalformedMessage, OSError) as error:
                if "refused" in str(error).lower():
                    self.refused[number] += 1
                    return
                self.broken[number] += 1

    def _keep_asking(self, number: int, connection: Connection) -> None:
        while not self._ending.is_set():
            value = number * 1000 + self.answered[number] % 1000
            reply = self.serving.ask(connection, value)
            if reply.status != 200:
                self.wrong.append(f"{reply.status}: {bytes(reply.body)[:200]!r}")
            elif outputs(reply) != [2.0 * value] * 4:
                self.wrong.append(f"{value}: {outputs(reply)}")
            self.answered[number] += 1
            if reply.headers.get("connection") == "close":
                return
