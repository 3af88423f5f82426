"""Debian's arm64 userland, made by mmdebstrap under qemu-user once and kept as one archive; each run gets a fresh copy.

The archive's name says what it was made of, so another list of packages makes another archive. It is written beside
its place and renamed when whole: a run that is killed leaves at most a file that the next one replaces.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arm64.debian import NotHere, archive, install_tools, why_not_fetched
from arm64.emulator import Emulator

UNREAD = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


@dataclass(frozen=True)
class Recipe:
    """What a root is made of."""

    release: str
    packages: tuple[str, ...]
    variant: str = "apt"

    @property
    def key(self) -> str:
        """Names the archive."""
        text = json.dumps([self.release, self.variant, sorted(self.packages), UNREAD])
        return f"{self.release}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def make_root(recipe: Recipe, emulator: Emulator, cache: Path) -> Path:
    """The archive of that root, from the cache or made now (a few minutes)."""
    made = cache / f"root-{recipe.key}.tar"
    if made.exists():
        return made
    if not shutil.which("mmdebstrap"):
        install_tools("mmdebstrap", "arch-test")
    emulator.check()
    print(f"making an arm64 root of Debian {recipe.release}: {made}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    coming = made.with_suffix(".coming.tar")
    work = cache / f"mmdebstrap-{recipe.key}"
    remove_root(work, emulator)
    work.mkdir()
    log = made.with_suffix(".log")
    with log.open("wb") as said:
        argv = ["nice", "-n", "10", *emulator.argv(_mmdebstrap(recipe, coming))]
        done = subprocess.run(argv, stdout=said, stderr=said, env=os.environ | {"TMPDIR": str(work)}, check=False)
    remove_root(work, emulator)
    if done.returncode != 0:
        told = log.read_text(errors="replace")
        raise NotHere(f"{why_not_fetched(told)}no root was made; {log} ends: {told[-1500:]}")
    coming.replace(made)
    return made


def unpack_root(made: Path, emulator: Emulator, folder: Path) -> None:
    """A fresh copy of the root, in a folder that is made for it."""
    folder.mkdir(parents=True)
    inside = ["tar", "-x", "--numeric-owner", "-f", str(made), "-C", str(folder)]
    _in_namespace(emulator, inside)


def remove_root(folder: Path, emulator: Emulator) -> None:
    """Its files may belong to users that only the namespace knows."""
    if folder.exists():
        _in_namespace(emulator, ["rm", "-rf", str(folder)])


def _mmdebstrap(recipe: Recipe, target: Path) -> Sequence[str]:
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in UNREAD]
    options += ["--dpkgopt=force-unsafe-io", "--skip=output/dev", "--skip=cleanup/apt"]
    return [
        "mmdebstrap", "--mode=root", "--architectures=arm64", f"--variant={recipe.variant}", *options,
        f"--include={','.join(recipe.packages)}", "--components=main", recipe.release, str(target), archive(),
    ]  # fmt: skip


def _in_namespace(emulator: Emulator, command: Sequence[str]) -> None:
    done = subprocess.run(emulator.argv(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr[-2000:], file=sys.stderr)
        raise NotHere(f"{command[0]} failed in the namespace: {done.stderr.strip()[-500:]}")
