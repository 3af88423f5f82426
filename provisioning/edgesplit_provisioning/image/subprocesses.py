"""Other programs that flashing needs: mtools, fsck.vfat, debugfs. Run without a shell, an environment or a terminal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Sequence

from edgesplit.errors import UsageError

PLACES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = {"fsck.vfat": "dosfstools", "debugfs": "e2fsprogs"}
TIMEOUT_S = 900.0


def run(command: Sequence[str], given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end; what it says is in the answer. TimeoutError where the disk under it hangs."""
    program = find(command[0])
    environment = {"PATH": _path(), "LC_ALL": "C.UTF-8", "MTOOLSRC": os.devnull, "MTOOLS_SKIP_CHECK": "1"}
    try:
        return subprocess.run(
            [program, *command[1:]],
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{command[0]} got no answer for {TIMEOUT_S:.0f} s") from error


def find(name: str) -> str:
    """Where the program is; UsageError says what to install."""
    found = shutil.which(name, path=_path())
    if found is None:
        raise UsageError(f"flashing needs `{name}`: install the package {PACKAGES.get(name, 'mtools')}")
    return found


def find_all() -> None:
    """All of them: before long work."""
    for name in ("mcopy", "mdir", "mmd", "mdel", "fsck.vfat", "debugfs"):
        find(name)


def said(answer: subprocess.CompletedProcess[bytes]) -> str:
    """What it complained of, in one line."""
    text = (answer.stderr or answer.stdout).decode("utf-8", "replace")
    return " ".join(text.split())[:300] or f"exit code {answer.returncode}"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{PLACES}"
