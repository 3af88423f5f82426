"""A Unix socket to listen on: nobody connects before its mode is set, a dead program's is replaced, a living one's not.

It is bound under another name, given its mode and owner, and renamed into place: so there is no moment in which it
is too open, and one that a killed program left behind is replaced in one step. That other name is reached through
its folder's descriptor: only the path that clients use has to fit into an address.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
from pathlib import Path

from edgesplit.errors import UsageError

LONGEST_PATH = 107
"""Bytes of a Unix socket's path (`sun_path` has 108, one of them a zero)."""
BACKLOG = 128
_PROBE_S = 2.0


def listening(path: Path, mode: int = 0o600, group: str | None = None) -> socket.socket:
    """A socket that listens at `path`. UsageError, which says what to do, where it cannot be."""
    beside = path.with_name(f".sock-{os.getpid()}-{secrets.token_hex(4)}")
    _check_length(path)
    _check_free(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(sock, beside)
        os.chmod(beside, mode & 0o777)
        if group is not None:
            shutil.chown(beside, group=group)
        sock.listen(BACKLOG)
        os.replace(beside, path)
    except (OSError, LookupError) as error:
        sock.close()
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on the socket {path}: {reason}; name another place with --socket") from error
    return sock


def _bind(sock: socket.socket, path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _check_length(path: Path) -> None:
    size = len(os.fsencode(path))
    if size > LONGEST_PATH:
        raise UsageError(
            f"a Unix socket's path has at most {LONGEST_PATH} bytes, and {path} has {size}: "
            "name a shorter one with --socket PATH, or go without with --socket none"
        )


def _check_free(path: Path) -> None:
    """UsageError where something is at `path` that is not a dead program's socket."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot look at {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{path} is there already and is no socket: remove it, or name another place with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise UsageError(f"cannot tell who listens on {path}: {error.strerror or error}") from error
    raise UsageError(f"another program listens on {path}: stop it, or name another place with --socket")


def identity(path: Path) -> tuple[int, int]:
    """Which file is at `path` now; (0, 0) for none."""
    try:
        found = os.lstat(path)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def remove(path: Path, ours: tuple[int, int]) -> None:
    """Take our socket's name away, unless another program's has taken its place meanwhile."""
    with contextlib.suppress(OSError):
        if identity(path) == ours:
            path.unlink()
