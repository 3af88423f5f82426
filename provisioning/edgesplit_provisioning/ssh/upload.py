"""Uploads a kit's files to a machine: each upload resumes where it was interrupted, is checked by its digest there, and
is put into place by one rename. Files that are already complete are not sent again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.file_hash import file_sha256
from edgesplit_provisioning.image.block_io import OnProgress
from edgesplit_provisioning.ssh.connection import BLOCK_BYTES, CommandResult, Ssh, last_line
from edgesplit_provisioning.ssh.facts import STAGE

FILE_TIMEOUT_S = 3_600.0
"""Timeout of one file, in seconds."""
DIGEST_MISMATCH, TRUNCATED = 5, 6
"""Exit statuses of `_PUT`: digest mismatch, and less content than announced."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DISK_FULL = "No space left on device"

_LIST = """
cd "$HOME" || exit 3
pwd
cd "$1" 2>/dev/null || exit 0
for name in * .*.part; do [ -f "$name" ] && [ ! -L "$name" ] && printf '%s %s\\n' "$name" "$(wc -c <"$name")"; done
exit 0
"""
_PREPARE = """
umask 077; cd "$HOME" || exit 3
[ ! -L "$1" ] || rm -f -- "$1"
mkdir -p -- "$1" && chmod 700 "$1" && cd "$1" || exit 3
shift
for name in * .*.part; do
  keep=
  for one in "$@"; do if [ "$name" = "$one" ] || [ "$name" = ".$one.part" ]; then keep=1; fi; done
  [ -n "$keep" ] || rm -rf -- "$name"
done
exit 0
"""
_DIGEST = 'cd "$HOME/$1" && sha256sum -- "$2"'
# Arguments: stage, name, offset, size, digest. Input that ends early means a lost connection: the partial file is kept.
_PUT = f"""
umask 077; cd "$HOME/$1" || exit 3
part=.$2.part
if [ "$3" = 0 ]; then rm -f -- "$part"; fi
cat >>"$part" || exit 4
if [ "$(wc -c <"$part")" -lt "$4" ]; then exit {TRUNCATED}; fi
got=$(sha256sum -- "$part") || exit 4
if [ "${{got%% *}}" != "$5" ]; then rm -f -- "$part"; exit {DIGEST_MISMATCH}; fi
sync -- "$part" 2>/dev/null || sync
mv -f -- "$part" "$2"
"""


@dataclass(frozen=True, slots=True)
class UploadState:
    """The files that an earlier upload left."""

    home: str
    sizes: Mapping[str, int]

    @property
    def stage(self) -> str:
        """The folder that files are uploaded to."""
        return f"{self.home}/{STAGE}"

    def bytes_of(self, name: str) -> int:
        """Bytes of that file that are there, complete or partial."""
        return self.sizes.get(name, self.sizes.get(f".{name}.part", 0))


def read_upload_state(ssh: Ssh) -> UploadState:
    """List what an earlier upload left."""
    home, *lines = ssh.run(_LIST, STAGE).out.decode("utf-8", "replace").splitlines() or [""]
    if not home.startswith("/"):
        raise UsageError(f"{ssh.host.target} has no home folder for this user")
    sizes: dict[str, int] = {}
    for line in lines:
        name, _, size = line.rpartition(" ")
        if _NAME.fullmatch(name.removeprefix(".").removesuffix(".part")) and size.isascii() and size.isdigit():
            sizes[name] = int(size[:15])
    return UploadState(home, sizes)


def upload_files(ssh: Ssh, files: Mapping[str, Path], state: UploadState, progress: OnProgress) -> None:
    """Upload these files to the staging folder and remove all others there. LinkError where the connection is lost;
    partial files stay and are resumed."""
    _prepare(ssh, files)
    total, before = sum(path.stat().st_size for path in files.values()), 0
    for name, path in files.items():
        _upload_file(ssh, name, path, state, lambda done, base=before: progress(base + done, total))  # type: ignore[misc]
        before += path.stat().st_size
        progress(before, total)


def upload_secret(ssh: Ssh, name: str, content: bytes) -> None:
    """Upload a small file that only its owner may read; its content never appears on a command line."""
    digest = hashlib.sha256(content).hexdigest()
    _check_result(ssh.run(_PUT, STAGE, name, "0", str(len(content)), digest, content=content), f"write {name}")


def _prepare(ssh: Ssh, names: Collection[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise MalformedMessage(f"not a kit's file name: {name[:80]!r}")
    _check_result(ssh.run(_PREPARE, STAGE, *names), "make a folder in the home")


def _upload_file(ssh: Ssh, name: str, path: Path, state: UploadState, progress: Callable[[int], None]) -> None:
    size, digest = path.stat().st_size, file_sha256(path)
    if state.sizes.get(name) == size and _digest_there(ssh, name) == digest:
        return
    partial = state.sizes.get(f".{name}.part", 0)
    # Resume; after a digest mismatch send the whole file once more.
    for offset in dict.fromkeys((partial if 0 < partial <= size else 0, 0)):
        content = _blocks(path, offset, progress)
        result = ssh.run(_PUT, STAGE, name, str(offset), str(size), digest, content=content, timeout_s=FILE_TIMEOUT_S)
        if result.ok:
            return
        if result.status not in (DIGEST_MISMATCH, TRUNCATED):
            _check_result(result, f"write {name}")
    raise LinkError(f"{ssh.host.target}: {name} arrives corrupted")


def _digest_there(ssh: Ssh, name: str) -> str:
    return ssh.run(_DIGEST, STAGE, name, timeout_s=FILE_TIMEOUT_S).out.decode("ascii", "replace").partition(" ")[0]


def _blocks(path: Path, offset: int, progress: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        done = offset
        while block := file.read(BLOCK_BYTES):
            yield block
            done += len(block)
            progress(done)


def _check_result(result: CommandResult, action: str) -> None:
    """Raise the error of a failed remote command; UsageError for a full disk."""
    if result.ok:
        return
    if _DISK_FULL in result.err:
        raise UsageError(f"no room there to {action}: free some on the home folder's disk, and do this again")
    raise EdgeError(f"cannot {action} there: {last_line(result.err)}")
