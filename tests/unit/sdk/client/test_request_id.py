"""Unique request ids."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid

from edgesplit.client.request_id import new_request_id


def test_request_ids_are_random_uuids_of_version_4() -> None:
    """As the standard library parses them; the agent recognises them as ids that no other request has."""
    for _ in range(200):
        one = new_request_id()
        read = uuid.UUID(one)
        assert (read.version, read.variant, read.urn) == (4, uuid.RFC_4122, one)


def test_request_ids_are_unique_across_threads() -> None:
    """Random bytes are used once."""
    found: list[list[str]] = [[] for _ in range(4)]

    def ask(mine: list[str]) -> None:
        mine += [new_request_id() for _ in range(1_000)]

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({request_id for mine in found for request_id in mine}) == 4_000


FORKS = """
import os
from edgesplit.client.request_id import new_request_id

new_request_id()
child = os.fork()
os.write(1, f"{new_request_id()}\\n".encode())
if child:
    os.waitpid(child, 0)
"""


def test_forked_child_has_other_request_ids() -> None:
    """Parent and child inherit the same unused random bytes."""
    told = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True).stdout.split()
    assert len(told) == 2 == len(set(told)) and all(uuid.UUID(request_id).urn == request_id for request_id in told)
