"""Installs an agent release as a version that can start: its wheels become a virtual environment, without a network.

The wheels were verified with the release; each is compared with its own RECORD once more and unpacked by the library
`installer`. No code of a wheel runs during installation, with one exception at the end: the new version's own
interpreter runs `edgesplit_agent.version_check`, which reports whether the version can live here, as a model must
answer its golden inputs before it serves. That run also compiles the modules it loads, and nothing is compiled later.
The Python remains the one on which the installed version runs.
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
from edgesplit.release.agent_release import WHEELS_FILE, Build, public_version
from edgesplit_agent.releases.disk_quota import RESERVE_BYTES, NoRoom
from edgesplit_agent.self_update.version_store import VersionStore

log = logging.getLogger(__name__)

MOST_WHEELS = 200
"""Maximum number of wheels in an agent release; no agent needs more."""
SKIPPED_WHEEL_PREFIX = "pip-"
"""Prefix of a wheel that a kit's installer brings for its own use and that is skipped."""
UNPACKED_RATIO = 4
"""Estimated disk space of an installed version, as a multiple of the size of its wheels."""
MOST_WHEEL_BYTES = 2 * 2**30
"""Maximum total size of the wheels in the archive."""
VERSION_CHECK_TIMEOUT_S = 120.0
"""Timeout of the version check: a slow card reads hundreds of megabytes of libraries for the first time."""
_INVALID_WHEEL_ERRORS = (
    InstallerError, zipfile.BadZipFile, ValueError, KeyError, AssertionError, RuntimeError, EOFError,
)  # fmt: skip


def install_version(
    store: VersionStore, release: str, build: Build, folder: Path, check_arguments: tuple[str, ...] = ()
) -> None:
    """Install the build whose verified files lie in `folder` as that release's version, unless it is installed and
    undamaged.

    `check_arguments` are passed to the version check. ModelRefused where a wheel is invalid or the version check
    refuses; UsageError where this Python cannot make environments; NoRoom where the disk is too full. On failure
    nothing is left behind.
    """
    if not store.damage(release):
        return
    part = store.new_part_folder(release)
    try:
        _check_room(part, build.version, (folder / WHEELS_FILE).stat().st_size)
        _build_environment(part, store.version_folder(release), folder / WHEELS_FILE)
        _run_version_check(part, build.version, check_arguments)
        store.adopt(part, release, build.version)
    except BaseException:  # also on a signal: an environment takes hundreds of megabytes
        shutil.rmtree(part, ignore_errors=True)
        raise
    log.info("agent %s is installed, as release %s", build.version, release[:12])


def _check_room(part: Path, version: str, packed: int) -> None:
    """NoRoom before anything is unpacked: a disk filled by an update of the agent would block updates of the models."""
    need, free = UNPACKED_RATIO * packed + RESERVE_BYTES, shutil.disk_usage(part).free
    if free < need:
        raise NoRoom(
            f"no room for agent {version}: installing it takes about {need / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"
            " on the disk; free some space, the step is retried"
        )


def _build_environment(part: Path, home: Path, archive: Path) -> None:
    """Make an environment in `part` with all wheels of the archive; `home` is where it will be moved."""
    _make_environment(part)
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=part) as scratch:
        for wheel in _wheels(archive, Path(scratch)):
            if not wheel.name.startswith(SKIPPED_WHEEL_PREFIX):
                _unpack(wheel, part, home)
            wheel.unlink()


def _make_environment(part: Path) -> None:
    try:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(part)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"this Python cannot make an environment for another version: {error}") from error


def _wheels(archive: Path, scratch: Path) -> Iterator[Path]:
    """Extract each wheel of the archive to a file in `scratch`, one after the other. ModelRefused for a member that is
    no wheel, and beyond the limits."""
    unpacked = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for count, member in enumerate(tar):
                name = PurePosixPath(member.name).name
                unpacked += member.size
                if not member.isreg() or not name.endswith(".whl") or name.startswith("."):
                    raise ModelRefused(f"{WHEELS_FILE}: {member.name[:80]!r} is no wheel")
                if count >= MOST_WHEELS or unpacked > MOST_WHEEL_BYTES:
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
    """Install one wheel's files into the environment; its scripts refer to the interpreter at its final place, below
    `home`."""
    site = str(_site_packages(part))
    scheme = {
        "purelib": site, "platlib": site, "scripts": str(part / "bin"), "data": str(part),
        "headers": str(part / "include"),
    }  # fmt: skip
    try:
        with WheelFile.open(wheel) as source:
            source.validate_record(validate_contents=True)
            destination = SchemeDictionaryDestination(scheme, str(home / "bin" / "python"), "posix")
            install(source, destination, additional_metadata={"INSTALLER": b"edgesplit-agent\n"})
    except _INVALID_WHEEL_ERRORS as error:
        raise ModelRefused(
            f"{wheel.name[:120]} cannot be installed: {str(error)[:200] or type(error).__name__}"
        ) from error


def _site_packages(home: Path) -> Path:
    """The site-packages folder of an environment. The scheme is named explicitly because Debian's default scheme
    differs."""
    base = {"base": str(home), "platbase": str(home)}
    return Path(sysconfig.get_path("purelib", "posix_prefix", base))


def _run_version_check(part: Path, version: str, check_arguments: tuple[str, ...]) -> None:
    """Run the version check. ModelRefused unless the version starts, is the one that was signed, and can live here."""
    command = [str(part / "bin" / "python"), "-I", "-m", "edgesplit_agent.version_check", *check_arguments]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=VERSION_CHECK_TIMEOUT_S, stdin=subprocess.DEVNULL, cwd=part
        )
    except subprocess.TimeoutExpired as error:
        raise ModelRefused(f"agent {version} does not start within {VERSION_CHECK_TIMEOUT_S:g} s") from error
    try:
        answer = json.loads(completed.stdout)
        own_version, problem = str(answer["version"]), str(answer["problem"])
    except (ValueError, KeyError, TypeError):
        last_line = (completed.stderr.strip().splitlines() or [f"it ended with status {completed.returncode}"])[-1]
        raise ModelRefused(f"agent {version} does not start here: {last_line[:300]}") from None
    if public_version(own_version) != version:
        raise ModelRefused(f"the release was signed as agent {version}, but reports version {own_version[:40]}")
    if problem:
        raise ModelRefused(f"agent {version} cannot run here: {problem[:300]}")
