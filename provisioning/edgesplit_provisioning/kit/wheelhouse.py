"""The wheels that a device needs, for its Python and its machine, by pip; kept by what was asked for.

pip resolves for another machine but reads conditions of requirements (`; python_version < "3.11"`) by the interpreter
that it runs on, so what it leaves out is found here and asked for, until nothing is missing.
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
from edgesplit_provisioning.kit.target import Target

Told = Callable[[str], None]
"""Is told what is being done, for people."""
INSTALLER = "pip"
LISTING = "SHA256SUMS"
MOST_ROUNDS = 8
DROPPED = re.compile(r"(?:\(constraint\)|No matching distribution found for) ([A-Za-z0-9._-]+)==")


def constraints() -> dict[str, str]:
    """The versions that edgesplit was tested with, by canonical name."""
    here = Path(__file__)
    for file in (here.with_name("constraints.txt"), here.parents[3] / "constraints.txt"):
        if file.is_file():
            return pins(file.read_text(encoding="utf-8"))
    raise UsageError("constraints.txt is missing from this installation of edgesplit: install it again")


def pins(text: str) -> dict[str, str]:
    """NAME==VERSION lines; comments are left out."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def wheels(
    target: Target, requirements: Sequence[str], cache: Path, *, wheelhouse: Path | None = None, told: Told
) -> list[Path]:
    """One wheel of each distribution that the requirements need on the target, pip's own among them.

    From `wheelhouse` alone where it is given; else from the package index, once for the same question. LinkError where
    the index cannot be reached, UsageError where there is no wheel for the target.
    """
    wanted = sorted({*requirements, INSTALLER})
    if wheelhouse is not None:
        if not wheelhouse.is_dir():
            raise UsageError(f"no folder of wheels: {wheelhouse}")
        listed = sorted((one.name, one.stat().st_size) for one in wheelhouse.glob("*.whl"))
        pinned: dict[str, str] = {}
        question: list[object] = [str(wheelhouse.resolve()), listed]
    else:
        pinned = constraints()
        question = [sorted(pinned.items())]
    asked = json.dumps([target.python, target.machine, target.glibc, wanted, *question])
    kept = cache / "wheels" / hashlib.sha256(asked.encode()).hexdigest()[:32]
    if found := _whole(kept):
        told(f"{len(found)} wheels from the cache")
        return found
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=kept.parent) as folder:
        work = Path(folder) / "wheels"
        _gather(_Pip(target, wheelhouse, told), wanted, pinned, work)
        return _keep(work, kept)


def missing(wheels: Iterable[Path], requirements: Iterable[str], markers: Mapping[str, str]) -> list[str]:
    """What these wheels and requirements ask for on a machine of those markers, and no wheel here is."""
    have = {canonicalize_name(parse_wheel_filename(one.name)[0]): one for one in wheels}
    lacking: set[str] = set()
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(text) for text in requirements]
    while queue:
        one = queue.pop()
        name = canonicalize_name(one.name)
        if name not in have:
            lacking.add(f"{one.name}{one.specifier}")
            continue
        for extra in ("", *sorted(one.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                queue += needs(have[name], {**markers, "extra": extra})
    return sorted(lacking)


def needs(wheel: Path, markers: Mapping[str, str]) -> list[Requirement]:
    """What the wheel asks for where the markers hold."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        headers = HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))
    found = [Requirement(text) for text in headers.get_all("Requires-Dist") or ()]
    return [one for one in found if one.marker is None or one.marker.evaluate(dict(markers))]


def _gather(pip: _Pip, wanted: Sequence[str], pinned: dict[str, str], work: Path) -> None:
    """Wheels into `work` until nothing that they ask for is missing."""
    asked = list(wanted)
    lacking: list[str] = []
    for _ in range(MOST_ROUNDS):
        pip.download(asked, pinned, work)
        lacking = missing(work.glob("*.whl"), asked, pip.target.markers)
        if not lacking:
            return
        asked += lacking
    raise UsageError(f"{pip.target}: wheels keep asking for more: {', '.join(lacking)}")


class _Pip:
    """pip, asked for another machine's wheels."""

    def __init__(self, target: Target, wheelhouse: Path | None, told: Told) -> None:
        self.target = target
        self._wheelhouse = wheelhouse
        self._told = told

    def download(self, requirements: Sequence[str], pinned: dict[str, str], folder: Path) -> None:
        """Their wheels into `folder`. Pins for which the target has no wheel are taken out of `pinned`: the newest
        version that it has stands in."""
        constraints_file = folder.parent / "constraints.txt"
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            constraints_file.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pinned.items())))
            refused = self._run(["-c", str(constraints_file), *requirements], folder)
            if refused is None:
                return
            unfit = {canonicalize_name(name) for name in DROPPED.findall(refused)} & set(pinned)
            if not unfit:
                raise _why(refused, self.target)
            self._told(f"no wheel of the tested version for {self.target}, so the newest of {', '.join(sorted(unfit))}")
            for name in unfit:
                del pinned[name]

    def _run(self, words: Sequence[str], folder: Path) -> str | None:
        """None, or what pip said when it failed."""
        argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
        argv += ["--progress-bar=off", "--only-binary=:all:"]
        argv += ["--implementation", "cp", "--python-version", self.target.python]
        argv += [word for tag in self.target.platforms for word in ("--platform", tag)]
        environment = dict(os.environ)
        if self._wheelhouse is not None:  # and from nowhere else that pip may be set up for
            argv += ["--no-index", "--find-links", str(self._wheelhouse)]
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
            environment["PIP_CONFIG_FILE"] = os.devnull
        said: list[str] = []
        with subprocess.Popen(
            [*argv, "-d", str(folder), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", stdin=subprocess.DEVNULL, env=environment,
        ) as running:  # fmt: skip
            assert running.stdout is not None
            for line in running.stdout:
                said.append(line)
                if line.startswith("Collecting "):
                    self._told(f"fetching {line.split()[1]}")
        return None if running.returncode == 0 else "".join(said)


def _why(said: str, target: Target) -> EdgeError:
    """The error that pip's last words stand for."""
    errors = [line.removeprefix("ERROR: ").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    text = errors[-1][:300] if errors else said.strip()[-300:]
    if "No module named pip" in said:
        return UsageError("a kit is gathered by pip, which is not installed here: python -m ensurepip")
    unreachable = re.search(r"Connection|Timeout|timed out|Temporary failure|SSLError|ProxyError", said)
    if unreachable is not None:
        return LinkError(f"cannot fetch wheels: {text}; with wheels that are here already: --wheelhouse DIR")
    return UsageError(f"no wheels for {target}: {text}")


def _keep(work: Path, kept: Path) -> list[Path]:
    """The gathered wheels in their place in the cache, with their digests."""
    found = sorted(work.glob("*.whl"))
    (work / LISTING).write_text("".join(f"{_digest(one)}  {one.name}\n" for one in found))
    shutil.rmtree(kept, ignore_errors=True)  # what is there was found to be spoilt
    try:
        os.rename(work, kept)
    except OSError:  # somebody else gathered the same at the same time
        if not _whole(kept):
            raise
    return _whole(kept)


def _whole(kept: Path) -> list[Path]:
    """The wheels that lie there, each as its digest says; none where one is spoilt or missing."""
    try:
        lines = [line.split("  ", 1) for line in (kept / LISTING).read_text().splitlines()]
        whole = all(_digest(kept / name) == digest for digest, name in lines)
    except (OSError, ValueError):
        return []
    return [kept / name for _, name in lines] if whole else []


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
