"""Message types are ready before two threads decode them for the first time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support import REPOSITORY

ROOT = REPOSITORY
ROOMS = ("sdk", "agent", "offload")
NEVER_READ = {"http1/server.py"}
"""Structs that hold requests and answers, and that no bytes are made into."""
FIRST = """
import sys, threading
from edgesplit.oip import protocol as oip
raw = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}'
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
def read():
    together.wait()
    oip.decode_request(raw, None)
threads = [threading.Thread(target=read) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
"""


@pytest.mark.parametrize("room", ROOMS)
def test_each_message_module_warms_up_its_types(room: str) -> None:
    """In its last line: every type defined above is ready when the module has been imported."""
    sources = {
        path: path.read_text() for path in (ROOT / room).rglob("*.py") if not str(path).endswith(tuple(NEVER_READ))
    }
    defining = [
        path for path, text in sources.items() if re.search(r"^class \w+\(.*msgspec\.Struct", text, re.MULTILINE)
    ]
    assert defining
    assert [path.name for path in defining if not sources[path].endswith("\nwarm_up_structs(__name__)\n")] == []


def test_concurrent_first_requests_do_not_crash_a_process() -> None:
    """msgspec 0.22 crashed one start in fifteen of a server with eight clients."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
