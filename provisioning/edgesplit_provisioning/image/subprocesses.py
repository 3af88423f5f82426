"""Runs the programs that flashing needs (mtools, fsck.vfat, debugfs) without a shell, the caller's environment or a
terminal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Sequence

from edgesplit.errors import UsageError

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders that are searched for programs after PATH."""
PACKAGES = {"fsck.vfat": "dosfstools", "debugfs": "e2fsprogs"}
TIMEOUT_S = 900.0


def run(
    command: Sequence[str], stdin: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end and return its output. TimeoutError after `timeout_s`, where the disk below it
    hangs."""
    program = find_program(command[0])
    environment = {"PATH": _path(), "LC_ALL": "C.UTF-8", "MTOOLSRC": os.devnull, "MTOOLS_SKIP_CHECK": "1"}
    try:
        return subprocess.run(
            [program, *command[1:]], input=stdin, stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True, env=environment, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{command[0]} got no answer for {timeout_s:.0f} s") from error


def find_program(name: str) -> str:
    """Path of the program; UsageError names the package to install."""
    path = shutil.which(name, path=_path())
    if path is None:
        raise UsageError(f"flashing needs `{name}`: install the package {PACKAGES.get(name, 'mtools')}")
    return path


def check_programs() -> None:
    """Check that every needed program is installed, before long work begins."""
    for name in ("mcopy", "mdir", "mmd", "mdel", "fsck.vfat", "debugfs"):
        find_program(name)


def error_text(result: subprocess.CompletedProcess[bytes]) -> str:
    """The error output of a program, in one line of at most 300 characters."""
    text = (result.stderr or result.stdout).decode("utf-8", "replace")
    return " ".join(text.split())[:300] or f"exit code {result.returncode}"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SEARCH_PATH}"
