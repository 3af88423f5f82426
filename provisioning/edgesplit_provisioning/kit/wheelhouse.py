"""Downloads the wheels that a device needs, for its Python and its machine, with pip; cached by the request.

pip selects wheels for another machine, but evaluates environment markers (`; python_version < "3.11"`) by the
interpreter that it runs on. Requirements that it leaves out are therefore computed here and requested, until none is
missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from edgesplit.errors import EdgeError, LinkError, UsageError
from edgesplit.file_hash import file_sha256
from edgesplit_provisioning.kit.target import Target

OnProgress = Callable[[str], None]
"""Progress callback; receives a line for display."""
INSTALLER = "pip"
"""Distribution that installs the others on the device."""
DIGESTS_FILE = "SHA256SUMS"
"""Name of the file with the digests of the cached wheels."""
MAX_ROUNDS = 8
"""Limit on rounds of download and dependency check."""
UNAVAILABLE = re.compile(r"(?:\(constraint\)|No matching distribution found for) ([A-Za-z0-9._-]+)==")
"""Names of pinned distributions in pip's message that it has no wheel of that version."""


def constraints() -> dict[str, str]:
    """The versions that edgesplit was tested with, by canonical name."""
    module = Path(__file__)
    for file in (module.with_name("constraints.txt"), module.parents[3] / "constraints.txt"):
        if file.is_file():
            return parse_pins(file.read_text(encoding="utf-8"))
    raise UsageError("constraints.txt is missing from this installation of edgesplit: install it again")


def parse_pins(text: str) -> dict[str, str]:
    """Parse NAME==VERSION lines; comments are ignored."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def collect_wheels(
    target: Target, requirements: Sequence[str], cache: Path, *, wheelhouse: Path | None = None, on_progress: OnProgress
) -> list[Path]:
    """One wheel of each distribution that the requirements need on the target, including pip's own.

    With `wheelhouse`, wheels come from that folder only; otherwise from the package index, cached by the request.
    LinkError where the index cannot be reached, UsageError where there is no wheel for the target.
    """
    wanted = sorted({*requirements, INSTALLER})
    if wheelhouse is not None:
        if not wheelhouse.is_dir():
            raise UsageError(f"no folder of wheels: {wheelhouse}")
        listed = sorted((path.name, path.stat().st_size) for path in wheelhouse.glob("*.whl"))
        pinned: dict[str, str] = {}
        source_key: list[object] = [str(wheelhouse.resolve()), listed]
    else:
        pinned = constraints()
        source_key = [sorted(pinned.items())]
    key = json.dumps([target.python, target.machine, target.glibc, wanted, *source_key])
    folder_in_cache = cache / "wheels" / hashlib.sha256(key.encode()).hexdigest()[:32]
    if cached := _checked_wheels(folder_in_cache):
        on_progress(f"{len(cached)} wheels from the cache")
        return cached
    folder_in_cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder_in_cache.parent) as folder:
        work = Path(folder) / "wheels"
        _download_all(_Pip(target, wheelhouse, on_progress), wanted, pinned, work)
        return _move_to_cache(work, folder_in_cache)


def missing_requirements(wheels: Iterable[Path], requirements: Iterable[str], markers: Mapping[str, str]) -> list[str]:
    """Requirements of these wheels and of `requirements`, under these markers, that none of the wheels satisfies."""
    available = {canonicalize_name(parse_wheel_filename(requirement.name)[0]): requirement for requirement in wheels}
    lacking: set[str] = set()
    visited: set[tuple[str, str]] = set()
    queue = [Requirement(text) for text in requirements]
    # Breadth over (distribution, extra) pairs: an extra of a distribution can add requirements of its own.
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name not in available:
            lacking.add(f"{requirement.name}{requirement.specifier}")
            continue
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in visited:
                visited.add((name, extra))
                queue += requirements_of(available[name], {**markers, "extra": extra})
    return sorted(lacking)


def requirements_of(wheel: Path, markers: Mapping[str, str]) -> list[Requirement]:
    """The wheel's requirements whose markers hold."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            candidate for candidate in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", candidate)
        )
        headers = HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))
    requirements = [Requirement(text) for text in headers.get_all("Requires-Dist") or ()]
    return [
        candidate for candidate in requirements if candidate.marker is None or candidate.marker.evaluate(dict(markers))
    ]


def _download_all(pip: _Pip, wanted: Sequence[str], pinned: dict[str, str], work: Path) -> None:
    """Download wheels into `work` until no requirement is missing."""
    requested = list(wanted)
    lacking: list[str] = []
    for _ in range(MAX_ROUNDS):
        pip.download(requested, pinned, work)
        lacking = missing_requirements(work.glob("*.whl"), requested, pip.target.markers)
        if not lacking:
            return
        requested += lacking
    raise UsageError(f"{pip.target}: requirements of the wheels are still missing: {', '.join(lacking)}")


class _Pip:
    """Runs pip to download wheels for another machine."""

    def __init__(self, target: Target, wheelhouse: Path | None, on_progress: OnProgress) -> None:
        self.target = target
        self._wheelhouse = wheelhouse
        self._on_progress = on_progress

    def download(self, requirements: Sequence[str], pinned: dict[str, str], folder: Path) -> None:
        """Download the wheels into `folder`. Pins for which the target has no wheel are removed from `pinned`, so that
        the newest available version is taken."""
        constraints_file = folder.parent / "constraints.txt"
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            constraints_file.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pinned.items())))
            refused = self._run(["-c", str(constraints_file), *requirements], folder)
            if refused is None:
                return
            unfit = {canonicalize_name(name) for name in UNAVAILABLE.findall(refused)} & set(pinned)
            if not unfit:
                raise _to_error(refused, self.target)
            self._on_progress(
                f"no wheel of the tested version for {self.target}, so the newest of {', '.join(sorted(unfit))}"
            )
            for name in unfit:
                del pinned[name]

    def _run(self, arguments: Sequence[str], folder: Path) -> str | None:
        """Run `pip download`; returns None on success, else its output."""
        argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
        argv += ["--progress-bar=off", "--only-binary=:all:"]
        argv += ["--implementation", "cp", "--python-version", self.target.python]
        argv += [word for tag in self.target.platforms for word in ("--platform", tag)]
        environment = dict(os.environ)
        if self._wheelhouse is not None:  # ignore every other source that pip may be configured with
            argv += ["--no-index", "--find-links", str(self._wheelhouse)]
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
            environment["PIP_CONFIG_FILE"] = os.devnull
        lines: list[str] = []
        with subprocess.Popen(
            [*argv, "-d", str(folder), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", stdin=subprocess.DEVNULL, env=environment,
        ) as running:  # fmt: skip
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                if line.startswith("Collecting "):
                    self._on_progress(f"fetching {line.split()[1]}")
        return None if running.returncode == 0 else "".join(lines)


def _to_error(output: str, target: Target) -> EdgeError:
    """The error that pip's output stands for."""
    errors = [line.removeprefix("ERROR: ").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    text = errors[-1][:300] if errors else output.strip()[-300:]
    if "No module named pip" in output:
        return UsageError("a kit is gathered by pip, which is not installed here: python -m ensurepip")
    unreachable = re.search(r"Connection|Timeout|timed out|Temporary failure|SSLError|ProxyError", output)
    if unreachable is not None:
        return LinkError(f"cannot fetch wheels: {text}; with wheels that are here already: --wheelhouse DIR")
    return UsageError(f"no wheels for {target}: {text}")


def _move_to_cache(work: Path, cached: Path) -> list[Path]:
    """Move the wheels into the cache, with a list of their digests."""
    wheel_files = sorted(work.glob("*.whl"))
    (work / DIGESTS_FILE).write_text("".join(f"{file_sha256(path)}  {path.name}\n" for path in wheel_files))
    shutil.rmtree(cached, ignore_errors=True)  # an existing folder was found damaged
    try:
        os.rename(work, cached)
    except OSError:  # another process downloaded the same wheels meanwhile
        if not _checked_wheels(cached):
            raise
    return _checked_wheels(cached)


def _checked_wheels(cached: Path) -> list[Path]:
    """The cached wheels, checked against their digests; empty where one is damaged or missing."""
    try:
        lines = [line.split("  ", 1) for line in (cached / DIGESTS_FILE).read_text().splitlines()]
        whole = all(file_sha256(cached / name) == digest for digest, name in lines)
    except (OSError, ValueError):
        return []
    return [cached / name for _, name in lines] if whole else []
