"""Creates a listening Unix socket with the right mode from its first moment; replaces a dead program's socket file
only.

The socket is bound under a temporary name, given its mode and owner, and renamed into place: it is never accessible
with a wrong mode, and a file left by a killed program is replaced atomically. The temporary name is addressed through
its folder's descriptor, so only the final path has to fit into a socket address.
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

MAX_PATH_BYTES = 107
"""Most bytes of a Unix socket's path (`sun_path` has 108, one of them a zero)."""
BACKLOG = 128
_PROBE_S = 2.0


def bind_and_listen(path: Path, mode: int = 0o600, group: str | None = None) -> socket.socket:
    """A socket that listens at `path`. UsageError with a remedy if that is impossible."""
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
    if size > MAX_PATH_BYTES:
        raise UsageError(
            f"a Unix socket's path has at most {MAX_PATH_BYTES} bytes, and {path} has {size}: "
            "name a shorter one with --socket PATH, or go without with --socket none"
        )


def _check_free(path: Path) -> None:
    """UsageError if anything but a dead program's socket is at `path`."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot access {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise UsageError(f"{path} exists already and is no socket: remove it, or name another place with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise UsageError(
                f"cannot find out whether a program listens on {path}: {error.strerror or error}"
            ) from error
    raise UsageError(f"another program listens on {path}: stop it, or name another place with --socket")


def identity(path: Path) -> tuple[int, int]:
    """Device and inode of the file at `path`; (0, 0) if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino


def remove(path: Path, own_identity: tuple[int, int]) -> None:
    """Unlink our socket file, unless another program's has replaced it meanwhile."""
    with contextlib.suppress(OSError):
        if identity(path) == own_identity:
            path.unlink()
