"""Debian's archive as this machine's own apt reaches it: packages of another release or processor, unpacked privately.

Nothing is installed and no file of apt's is touched: the lists, the cache and the sources lie in a folder of ours. The
archive's address is the one that this machine uses for Debian (EDGESPLIT_DEBIAN_MIRROR gives another), and what comes
from it is believed as ever: by Debian's signature.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class NotHere(Exception):
    """This machine lacks something that only its administrator can give; says what."""


def archive() -> str:
    """The address of Debian's archive; NotHere where this machine's apt knows none."""
    if given := os.environ.get("EDGESPLIT_DEBIAN_MIRROR"):
        return given
    wanted = ["--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"]
    try:
        lines = _output(["apt-get", "indextargets", *wanted]).splitlines()
    except FileNotFoundError as error:
        raise NotHere("no apt on this machine: real arm64 programs come from Debian's archive") from error
    for line in lines:
        address, _, label = line.partition(" ")
        if label == "Debian":
            return address
    raise NotHere("this machine's apt knows no archive of Debian: set EDGESPLIT_DEBIAN_MIRROR to one")


def fetch_package(name: str, release: str, folder: Path, *, machine: str = "amd64") -> Path:
    """The newest package of that name in a release of Debian, as a .deb file in the folder."""
    configuration = _private_apt(release, machine, folder / "apt")
    _checked(["apt-get", "-q", "-c", str(configuration), "update"], folder)
    _checked(["apt-get", "-q", "-c", str(configuration), "download", f"{name}:{machine}"], folder)
    return max(folder.glob(f"{name}_*_{machine}.deb"), key=lambda file: file.stat().st_mtime)


def unpack_package(package: Path, folder: Path) -> None:
    """Its files, below the folder; none of its scripts run."""
    _checked(["dpkg-deb", "-x", str(package), str(folder)], package.parent)


def install_tools(*packages: str) -> None:
    """Install tools of this machine's own Debian, saying so; NotHere without root or without apt."""
    if os.geteuid() != 0:
        raise NotHere(f"please install: {' '.join(packages)}")
    print(f"installing from Debian: {' '.join(packages)}", flush=True)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", "-q", *words], env=quiet, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            why = why_not_fetched(done.stderr)
            raise NotHere(f"{why}Debian's {' '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")


def _private_apt(release: str, machine: str, folder: Path) -> Path:
    """An apt configuration that sees one release and has its state here."""
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    source = folder / f"{release}.list"
    source.write_text(f"deb [arch={machine} signed-by={KEYRING}] {archive()} {release} main\n")
    configuration = folder / f"{release}-{machine}.conf"
    configuration.write_text(
        f'Dir::Etc::sourcelist "{source}";\nDir::Etc::sourceparts "/dev/null";\nDir::State "{folder / "state"}";\n'
        f'Dir::State::status "/dev/null";\nDir::Cache "{folder / "cache"}";\nAPT::Architecture "{machine}";\n'
        f'APT::Architectures {{ "{machine}"; }};\n'
        'APT::Sandbox::User "root";\nAcquire::Languages "none";\nAcquire::Retries "3";\n'
        'APT::Update::Error-Mode "any";\n'  # a list that did not come would be told as a package that does not exist
    )
    return configuration


def _checked(argv: list[str], folder: Path) -> None:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise NotHere(f"{why_not_fetched(said)}{' '.join(argv[:4])}: {said[-500:]}")


def why_not_fetched(said: str) -> str:
    """A sentence before apt's own words where it is the mirror that gave nothing; empty for anything else."""
    if re.search(r"\b429\b|Too Many Requests", said):
        what = "Debian's mirror limits how much is fetched, and has had enough of us for now"
    elif re.search(r"\b40[134]\s+\w|\b5\d\d\s+\w", said):
        what = "Debian's mirror refuses what was asked for"
    elif re.search(r"resolv|[Cc]ould not connect|[Uu]nable to connect|[Cc]onnection (refused|timed out|failed)", said):
        what = "Debian's mirror cannot be reached"
    else:
        return ""
    return f"{what}: run it again later, or name another one in EDGESPLIT_DEBIAN_MIRROR; what is here is kept. "


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
