"""From the wheels of an agent release to a version that can start: a virtual environment, without a network.

The wheels were verified as a release is; each is compared with its own record once more, and unpacked by the library
`installer`. Nothing of a wheel is run here, with one exception, last: the new version's own interpreter says whether it
could live here (`fitness`), as a model answers its golden inputs before it may run; what it loads for that stays
compiled, and nothing is compiled later. The Python stays the one that the installed version runs on.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.exceptions import InstallerError
from installer.sources import WheelFile

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.release.agent_release import WHEELS_FILE, Build, released
from edgesplit_agent.releases.disk_quota import RESERVE_BYTES, NoRoom
from edgesplit_agent.self_update.version_store import Shelf

log = logging.getLogger(__name__)

WHEELS = 200
"""No agent needs more."""
NOT_NEEDED = "pip-"
"""A kit's installer brings it along for itself."""
UNPACKED = 4
"""An installed version takes so many times its wheels."""
UNPACKED_BYTES = 2 * 2**30
FITNESS_S = 120.0
"""A slow card reads hundreds of megabytes of libraries for the first time."""
_NO_WHEEL = (InstallerError, zipfile.BadZipFile, ValueError, KeyError, AssertionError, RuntimeError, EOFError)


def put_together(shelf: Shelf, release: str, build: Build, folder: Path, question: tuple[str, ...] = ()) -> None:
    """Install the build whose verified files lie in `folder` as that release's version, if it is not there, whole.

    `question`: what its own word on whether it can live here is asked with. ModelRefused where the wheels are none, or
    the version says that it cannot; UsageError where this Python cannot make environments; then nothing of it stays.
    """
    if not shelf.damage(release):
        return
    part = shelf.fresh(release)
    try:
        _check_room(part, build.version, (folder / WHEELS_FILE).stat().st_size)
        _fill(part, shelf.home(release), folder / WHEELS_FILE)
        _check_fitness(part, build.version, question)
        shelf.adopt(part, release, build.version)
    except BaseException:  # what takes hundreds of megabytes is not left lying there
        shutil.rmtree(part, ignore_errors=True)
        raise
    log.info("agent %s is installed, as release %s", build.version, release[:12])


def _check_room(part: Path, version: str, packed: int) -> None:
    """NoRoom before anything is unpacked: a disk that an update filled would keep the models from theirs."""
    need, free = UNPACKED * packed + RESERVE_BYTES, shutil.disk_usage(part).free
    if free < need:
        raise NoRoom(
            f"no room for agent {version}: installing it takes about {need / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"
            " on the disk; free some, it is tried again"
        )


def _fill(part: Path, home: Path, archive: Path) -> None:
    """An environment with all the wheels in it."""
    _make_environment(part)
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=part) as scratch:
        for wheel in _wheels(archive, Path(scratch)):
            if not wheel.name.startswith(NOT_NEEDED):
                _unpack(wheel, part, home)
            wheel.unlink()


def _make_environment(part: Path) -> None:
    try:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(part)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"this Python cannot make an environment for another version: {error}") from error


def _wheels(archive: Path, scratch: Path) -> Iterator[Path]:
    """Each wheel of the archive as a file, one after the other."""
    unpacked = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for count, member in enumerate(tar):
                name = PurePosixPath(member.name).name
                unpacked += member.size
                if not member.isreg() or not name.endswith(".whl") or name.startswith("."):
                    raise ModelRefused(f"{WHEELS_FILE}: {member.name[:80]!r} is no wheel")
                if count >= WHEELS or unpacked > UNPACKED_BYTES:
                    raise ModelRefused(f"{WHEELS_FILE}: more wheels than an agent needs")
                content = tar.extractfile(member)
                assert content is not None
                path = scratch / name
                with path.open("xb") as target:
                    while piece := content.read(1 << 20):
                        target.write(piece)
                yield path
    except tarfile.TarError as error:
        raise ModelRefused(f"{WHEELS_FILE} is no archive: {error}") from error


def _unpack(wheel: Path, part: Path, home: Path) -> None:
    """Its files into the environment; its scripts will find the interpreter where it is going to lie."""
    site = str(_site(part))
    scheme = {
        "purelib": site, "platlib": site, "scripts": str(part / "bin"), "data": str(part),
        "headers": str(part / "include"),
    }  # fmt: skip
    try:
        with WheelFile.open(wheel) as source:
            source.validate_record(validate_contents=True)
            destination = SchemeDictionaryDestination(scheme, str(home / "bin" / "python"), "posix")
            install(source, destination, additional_metadata={"INSTALLER": b"edgesplit-agent\n"})
    except _NO_WHEEL as error:
        raise ModelRefused(
            f"{wheel.name[:120]} cannot be installed: {str(error)[:200] or type(error).__name__}"
        ) from error


def _site(home: Path) -> Path:
    """Where an environment keeps what is installed in it. Debian's default scheme is another one: it is asked for."""
    base = {"base": str(home), "platbase": str(home)}
    return Path(sysconfig.get_path("purelib", "posix_prefix", base))


def _check_fitness(part: Path, version: str, question: tuple[str, ...]) -> None:
    """ModelRefused unless the version starts, is the one that was signed, and can live here."""
    command = [str(part / "bin" / "python"), "-I", "-m", "edgesplit_agent.version_check", *question]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=FITNESS_S, stdin=subprocess.DEVNULL, cwd=part
        )
    except subprocess.TimeoutExpired as error:
        raise ModelRefused(f"agent {version} does not start within {FITNESS_S:g} s") from error
    try:
        said = json.loads(asked.stdout)
        told, problem = str(said["version"]), str(said["problem"])
    except (ValueError, KeyError, TypeError):
        last = (asked.stderr.strip().splitlines() or [f"it ended with status {asked.returncode}"])[-1]
        raise ModelRefused(f"agent {version} does not start here: {last[:300]}") from None
    if released(told) != version:
        raise ModelRefused(f"what was signed as agent {version} calls itself {told[:40]}")
    if problem:
        raise ModelRefused(f"agent {version} cannot run here: {problem[:300]}")
