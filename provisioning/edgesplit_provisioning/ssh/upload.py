"""A kit's files to a machine: each continued where it was cut off, checked by its digest there, and put in place by one
rename. What is there already and right is not sent again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit_provisioning.ssh.connection import BLOCK, Ran, Ssh, last
from edgesplit_provisioning.ssh.facts import STAGE

Progress = Callable[[int, int], None]
"""Bytes there, of how many."""
LONGEST_S = 3_600.0
"""For one file."""
SPOILT, SHORT = 5, 6
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ROOM = "No space left on device"

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
# Stage, name, offset, size, digest. Where the input ends early, the connection was cut: what came is kept.
_PUT = f"""
umask 077; cd "$HOME/$1" || exit 3
part=.$2.part
if [ "$3" = 0 ]; then rm -f -- "$part"; fi
cat >>"$part" || exit 4
if [ "$(wc -c <"$part")" -lt "$4" ]; then exit {SHORT}; fi
got=$(sha256sum -- "$part") || exit 4
if [ "${{got%% *}}" != "$5" ]; then rm -f -- "$part"; exit {SPOILT}; fi
sync -- "$part" 2>/dev/null || sync
mv -f -- "$part" "$2"
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is there of a kit."""

    home: str
    sizes: Mapping[str, int]

    @property
    def stage(self) -> str:
        """The folder that is copied to."""
        return f"{self.home}/{STAGE}"

    def of(self, name: str) -> int:
        """Bytes of that file that are there, whole or begun."""
        return self.sizes.get(name, self.sizes.get(f".{name}.part", 0))


def standing(ssh: Ssh) -> Standing:
    """What was copied before, and not deleted."""
    home, *lines = ssh.run(_LIST, STAGE).out.decode("utf-8", "replace").splitlines() or [""]
    if not home.startswith("/"):
        raise UsageError(f"{ssh.host.target} does not say where this user's home is")
    sizes: dict[str, int] = {}
    for line in lines:
        name, _, size = line.rpartition(" ")
        if _NAME.fullmatch(name.removeprefix(".").removesuffix(".part")) and size.isascii() and size.isdigit():
            sizes[name] = int(size[:15])
    return Standing(home, sizes)


def carry(ssh: Ssh, files: Mapping[str, Path], there: Standing, progress: Progress) -> None:
    """Have these files in the stage folder there, whole, and no others. LinkError where the connection is lost: what
    came stays."""
    _prepare(ssh, files)
    total, before = sum(path.stat().st_size for path in files.values()), 0
    for name, path in files.items():
        _carry_file(ssh, name, path, there, lambda done, base=before: progress(base + done, total))  # type: ignore[misc]
        before += path.stat().st_size
        progress(before, total)


def put_secret(ssh: Ssh, name: str, content: bytes) -> None:
    """A small file that only its owner may read; never on a command line."""
    digest = hashlib.sha256(content).hexdigest()
    _done(ssh.run(_PUT, STAGE, name, "0", str(len(content)), digest, content=content), f"write {name}")


def sha256(path: Path) -> str:
    """Of a file here."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(block)
    return whole.hexdigest()


def _prepare(ssh: Ssh, names: Collection[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise MalformedMessage(f"not a kit's file name: {name[:80]!r}")
    _done(ssh.run(_PREPARE, STAGE, *names), "make a folder in the home")


def _carry_file(ssh: Ssh, name: str, path: Path, there: Standing, progress: Callable[[int], None]) -> None:
    size, digest = path.stat().st_size, sha256(path)
    if there.sizes.get(name) == size and _digest_there(ssh, name) == digest:
        return
    begun = there.sizes.get(f".{name}.part", 0)
    for offset in dict.fromkeys((begun if 0 < begun <= size else 0, 0)):  # a spoilt beginning costs the whole once
        content = _blocks(path, offset, progress)
        ran = ssh.run(_PUT, STAGE, name, str(offset), str(size), digest, content=content, timeout_s=LONGEST_S)
        if ran.ok:
            return
        if ran.status not in (SPOILT, SHORT):
            _done(ran, f"write {name}")
    raise LinkError(f"{ssh.host.target}: {name} does not arrive as it was sent")


def _digest_there(ssh: Ssh, name: str) -> str:
    return ssh.run(_DIGEST, STAGE, name, timeout_s=LONGEST_S).out.decode("ascii", "replace").partition(" ")[0]


def _blocks(path: Path, offset: int, progress: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        done = offset
        while block := file.read(BLOCK):
            yield block
            done += len(block)
            progress(done)


def _done(ran: Ran, what: str) -> None:
    if ran.ok:
        return
    if _ROOM in ran.err:
        raise UsageError(f"no room there to {what}: free some on the home folder's disk, and do this again")
    raise EdgeError(f"cannot {what} there: {last(ran.err)}")
