"""Sends a list of byte buffers by as few system calls as possible."""

from __future__ import annotations

import socket

MAX_PARTS = 512
"""Most buffers per `sendmsg` call; the kernel takes 1,024 at most."""


def send_some(sock: socket.socket, unsent: list[bytes | memoryview]) -> None:
    """Send as much of `unsent` as one system call takes, and remove it from the list. OSError."""
    sent = sock.sendmsg(unsent if len(unsent) <= MAX_PARTS else unsent[:MAX_PARTS])
    sent_parts = 0
    while sent_parts < len(unsent) and sent >= len(unsent[sent_parts]):
        sent -= len(unsent[sent_parts])
        sent_parts += 1
    del unsent[:sent_parts]
    if sent:
        unsent[0] = memoryview(unsent[0])[sent:]
