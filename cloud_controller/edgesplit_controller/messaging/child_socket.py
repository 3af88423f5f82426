"""The end of one connection of a child process, from outside: its socket is borrowed (pidfd_getfd(2)) and shut down.

The kernel allows that to the parent of a process that runs as the same user, and it takes no time of the child's, which
may be busy with what that very connection sends.
"""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD: Final = 438
"""System call, on every processor."""


def shut_down_socket(pid: int, inode: int) -> bool:
    """Shut down the socket with this inode in both directions; False if the child has no such socket any more. OSError
    where the kernel refuses (as in a container without that system call)."""
    number = _descriptor_of(pid, inode)
    if number is None:
        return False
    with open(os.pidfd_open(pid), "rb") as process:
        borrowed = _LIBC.syscall(_PIDFD_GETFD, process.fileno(), number, 0)
    if borrowed < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=borrowed) as connection:
        if os.fstat(borrowed).st_ino != inode:  # closed meanwhile, and its number given to another
            return False
        connection.shutdown(socket.SHUT_RDWR)
    return True


def _descriptor_of(pid: int, inode: int) -> int | None:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}") == f"socket:[{inode}]":
                return int(name)
        except FileNotFoundError:  # closed meanwhile
            continue
    return None
