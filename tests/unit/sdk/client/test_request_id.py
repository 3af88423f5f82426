"""Ids that are nobody else's."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid

from edgesplit.client.request_id import new_request_id


def test_they_are_random_uuids_of_version_4() -> None:
    """As the standard library reads them, and as the agent knows ids that no other request can have."""
    for _ in range(200):
        one = new_request_id()
        read = uuid.UUID(one)
        assert (read.version, read.variant, read.urn) == (4, uuid.RFC_4122, one)


def test_none_comes_twice_however_many_threads_ask() -> None:
    """Random bytes are handed out once."""
    found: list[list[str]] = [[] for _ in range(4)]

    def ask(mine: list[str]) -> None:
        mine += [new_request_id() for _ in range(1_000)]

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one for mine in found for one in mine}) == 4_000


FORKS = """
import os
from edgesplit.client.request_id import new_request_id

new_request_id()
child = os.fork()
os.write(1, f"{new_request_id()}\\n".encode())
if child:
    os.waitpid(child, 0)
"""


def test_a_forked_child_has_others() -> None:
    """Parent and child had the same random bytes left when they parted."""
    told = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True).stdout.split()
    assert len(told) == 2 == len(set(told)) and all(uuid.UUID(one).urn == one for one in told)
