"""A soak's hands: clients at full load that account for every id, readers that dawdle, and an eye on the memory and the
descriptors of a tree of processes."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np

from edgesplit.client.client import Answer, Client
from edgesplit.errors import EdgeError
from edgesplit.oip import protocol as oip
from support.edgesplit_processes import relative_error

DEADLINE_S = 2.0
TOLERANCE = 1e-3


@dataclass
class Account:
    """What became of the requests. Thread-safe."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, outcome: str) -> None:
        """One id has its one outcome."""
        with self._lock:
            self.outcomes[outcome] += 1

    def complain(self, text: str) -> None:
        """Something that may not be."""
        with self._lock:
            self.wrong.append(text)


class Load:
    """Clients that ask as fast as they are answered, and readers that do not read."""

    def __init__(self, url: str, model: str, frames: Mapping[str, Mapping[str, Any]], want: Mapping[str, Any]) -> None:
        self.account = Account()
        self._url, self._model, self._frames, self._want = url, model, frames, want
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, clients: int, dawdlers: int, seed: str) -> None:
        for number in range(clients):
            self._spawn(lambda number=number: self._ask(f"{seed}-{number}"))  # type: ignore[misc]
        for _ in range(dawdlers):
            self._spawn(self._dawdle)

    def stop(self) -> None:
        """All of them, each after its request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a client never came back"

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _ask(self, name: str) -> None:
        dice, number = random.Random(name), 0
        with Client(self._url) as client:
            while not self._stop.is_set():
                number += 1
                frame = dice.choice(sorted(self._frames))
                first = self._once(client, frame, f"{name}-{number}")
                if first is not None and dice.random() < 0.1:
                    again = self._once(client, frame, f"{name}-{number}", counted=False)
                    if again is not None and again.report != first.report:
                        self.account.complain(f"{name}-{number}: answered twice")

    def _once(self, client: Client, frame: str, name: str, *, counted: bool = True) -> Answer | None:
        """One outcome for one id."""
        try:
            answer = client.infer(self._model, self._frames[frame], deadline_s=DEADLINE_S, request_id=name)
        except EdgeError as error:
            if counted:
                self.account.settle(type(error).__name__)
            return None
        except Exception as error:
            self.account.complain(f"{name}: {error!r}")
            return None
        for output, want in self._want[frame].items():
            if relative_error(answer.outputs[output], want) > TOLERANCE:
                self.account.complain(f"{name}: {output} is wrong")
        if counted:
            report = answer.report
            assert report is not None
            self.account.settle("local" if report.row == "local" else "fallback" if report.fallback else "cloud")
        return answer

    def _dawdle(self) -> None:
        """Ask, read a byte now and then, hang up amid the answer, and again."""
        frame = next(iter(self._frames.values()))
        inputs = {
            name: np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value for name, value in frame.items()
        }
        host, _, port = self._url.partition("://")[2].rpartition(":")
        while not self._stop.is_set():
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as sock:
                body, length = oip.encode_request(oip.InferRequest(inputs, parameters={"timeout": 500_000}))
                size = sum(len(part) for part in body)
                head = (
                    f"POST /v2/models/{self._model}/infer HTTP/1.1\r\nhost: localhost\r\n"
                    f"{oip.HEADER_LENGTH}: {length}\r\ncontent-length: {size}\r\n\r\n"
                )
                sock.sendall(head.encode() + b"".join(body))
                for _ in range(5):
                    sock.recv(1)
                    self._stop.wait(0.05)


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def named(pids: list[int], word: str) -> list[int]:
    """Those whose command line has this word in it."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@dataclass(frozen=True)
class Sample:
    """Of one process tree at one moment."""

    at: float
    rss_bytes: int
    descriptors: int

    @classmethod
    def of(cls, pids: list[int]) -> Sample:
        rss = descriptors = 0
        for pid in pids:
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                rss += 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
                descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(monotonic(), rss, descriptors)


def growth(samples: list[Sample], what: Callable[[Sample], float]) -> float:
    """From the third quarter's median to the last quarter's: what warms up is over by then, what leaks is not."""
    quarter = len(samples) // 4
    third, last = samples[2 * quarter : 3 * quarter], samples[3 * quarter :]
    return median(map(what, last)) - median(map(what, third))
