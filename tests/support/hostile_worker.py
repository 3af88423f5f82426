"""A worker process that a model has taken over: it does as `EDGESPLIT_HOSTILE` says."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from edgesplit_agent.worker import child, ipc
from edgesplit_agent.worker.ipc import Channel, Opened, RunResult, SharedTensor

FAR = 2**40


class Hostile(Channel[Any]):
    """Spoils what the worker would say."""

    def send(self, message: Any, files: Any = (), timeout_s: float | None = None) -> None:
        mood = os.environ["EDGESPLIT_HOSTILE"]
        if isinstance(message, Opened):
            if mood == "dies while it loads":
                os.kill(os.getpid(), signal.SIGSEGV)
            if mood == "dies once while it loads" and not (mark := Path(os.environ["EDGESPLIT_MARK"])).exists():
                mark.touch() if os.access(mark.parent, os.W_OK) else None
                os.kill(os.getpid(), signal.SIGSEGV)
            if mood == "opens other slices":
                message = msgspec.structs.replace(message, slices=("t",))
        if not isinstance(message, RunResult):
            return super().send(message, files, timeout_s)
        if mood in RAW:
            for _ in range(3):
                self._socket.send(RAW[mood])
            return None
        if mood == "sends files":
            return socket.send_fds(self._socket, [ipc.LAST, self._encoder.encode(message)], [0, 1, 2]) and None
        if mood == "parts without an end":
            while True:
                self._socket.send(ipc.MORE + bytes(ipc.PART_BYTES))
        one = message.outputs[0] if message.outputs else None
        super().send(_spoiled(mood, message, one), files, timeout_s)
        return None


def _spoiled(mood: str, ran: RunResult, one: SharedTensor | None) -> RunResult:
    if mood == "answers another question":
        return msgspec.structs.replace(ran, number=ran.number + 1)
    if mood in SECONDS:
        return msgspec.structs.replace(ran, seconds=SECONDS[mood])
    if one is None or mood not in OUTPUTS:
        return ran
    changed = OUTPUTS[mood]
    outputs = () if changed is None else (msgspec.structs.replace(one, **changed),)
    return msgspec.structs.replace(ran, outputs=outputs)


RAW = {
    "garbage": b"\xc1" * 100,
    "garbage in a last part": ipc.LAST + b"\xc1" * 100,
    "endless nesting": ipc.LAST + b"\x91" * 60_000,
    "too long": b"\x00" * 150_000,
    "empty parts": ipc.MORE,
    "short parts": ipc.MORE + b"\x00" * 10,
}
SECONDS = {
    "times that are none": {"s": float("nan")},
    "times below zero": {"s": -1.0},
    "times of strangers": {f"t{number}": 0.1 for number in range(1_000)},
}
OUTPUTS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "another tensor": {"name": "z"},
    "another segment": {"segment": 999},
    "far beyond the room": {"offset": FAR},
    "before the room": {"offset": 0},
    "longer than the room": {"bytes": FAR},
    "a shape that is larger": {"shape": (1, 2**40)},
    "a shape that overflows": {"shape": (2**62, 4, 2**62)},
    "a type that is none": {"datatype": "FP3"},
    "text without an end": {"datatype": "BYTES", "shape": (2**40,)},
}
LOADS = ("dies while it loads", "opens other slices")


if __name__ == "__main__":
    ipc.Channel = Hostile  # type: ignore[misc]
    sys.exit(child.main(sys.argv[1:]))
