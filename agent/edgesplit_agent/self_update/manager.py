"""The agent's own version, as the update loop handles it: one more thing that is wanted, staged, tried, committed.

Promises: what is installed was verified just before, by the release's own chain of signatures; what changes is on disk
before this process ends for it; without a launcher nothing is changed at all. Leaves to others: when to do what
(`updates`), and starting (`launch`).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from edgesplit import __version__
from edgesplit.errors import ModelRefused, TrustError, UsageError
from edgesplit.release.agent_release import AGENT, Build, build_for, is_agent, this_machine
from edgesplit.release.manifest import Manifest
from edgesplit.release_store import Release
from edgesplit_agent.self_update import slots
from edgesplit_agent.self_update.launcher import Launched
from edgesplit_agent.self_update.slots import Versions
from edgesplit_agent.self_update.version_store import Shelf
from edgesplit_agent.state.data_folder import DataFolder

log = logging.getLogger(__name__)

NO_LAUNCHER = (
    "this agent was not started by `edgesplit-agent launch`, so it cannot change its own version: start it so (the"
    " service that install.sh makes does), or install the version with a kit"
)


Install = Callable[[Shelf, str, Build, Path, "tuple[str, ...]"], None]
"""As `install.put_together`."""


def _put_together(shelf: Shelf, release: str, build: Build, folder: Path, question: tuple[str, ...]) -> None:
    from edgesplit_agent.self_update.install import put_together  # what it imports is needed on few days

    put_together(shelf, release, build, folder, question)


class OwnVersion:
    """The version that this process is, and those beside it. Of the update loop's thread, but for `stopped`."""

    def __init__(
        self,
        folder: DataFolder,
        launched: Launched | None = None,
        restart: Callable[[], None] = lambda: None,
        install: Install = _put_together,
    ) -> None:
        """`restart` ends this process soon, in good order, and lets the launcher choose again."""
        self._install = install
        self._folder = folder
        self._shelf = Shelf(folder.path)
        self._launched = launched
        self._restart = restart
        self._lock = threading.Lock()
        self._known = self._shelf.read() if launched is not None else Versions()
        self._starts_before = max(0, self._known.starts - 1)

    @property
    def release(self) -> str:
        """The release that this process came as; empty for the installed version."""
        return self._launched.release if self._launched is not None else slots.INSTALLED

    @property
    def built_for(self) -> str:
        """Which builds fit here; empty where none could be started."""
        return this_machine().tag if self._launched is not None else ""

    @property
    def on_trial(self) -> bool:
        """Is this version one that was not found healthy yet?"""
        return bool(self.release) and self._known.trial == self.release

    @property
    def served(self) -> frozenset[str]:
        """The models that answered before the trial."""
        return frozenset(self._known.served)

    @property
    def offline(self) -> bool:
        """Had the version before the one on trial no broker?"""
        return self._known.offline

    @property
    def running(self) -> dict[str, str]:
        """What this process is, as a model's release is told."""
        return {AGENT: self.release} if self.release else {}

    @property
    def committed(self) -> dict[str, str]:
        """What was found healthy last."""
        return {AGENT: self._known.committed} if self._known.committed else {}

    @property
    def kept(self) -> set[str]:
        """Releases that may have to start again: they are never dropped."""
        return {self.release, self._known.committed, self._known.trial} - {slots.INSTALLED}

    def settle_format(self) -> None:
        """A version that is not on trial writes its own format. A disk that is full keeps no agent from starting."""
        if self.on_trial:
            return
        try:
            self._folder.settle_format()
        except OSError as error:
            log.warning("the data folder stays of its older format: %s", error.strerror)

    def why_bad(self, release: str) -> str | None:
        """Why that release is not tried again; None where nothing is known against it."""
        return self._known.bad.get(release)

    def why_refused(self, release: str) -> str | None:
        """The same of one that never ran."""
        return self._known.refused.get(release)

    def slices(self, manifest: Manifest) -> set[str]:
        """What this machine needs of an agent release; UsageError where that is not for it, or cannot be used."""
        if self._launched is None:
            raise UsageError(NO_LAUNCHER)
        return {build_for(manifest, this_machine()).slice.name}

    def verify(self, opened: Release, counter: int) -> None:
        """Install the release beside this version, and let it say whether it could live here. `counter` is of the
        statement that asks for it."""
        if self._launched is None:
            raise UsageError(NO_LAUNCHER)
        build = build_for(opened.manifest, this_machine())
        folder = opened.slice_folder(build.slice.name)
        question = ("--launcher", str(self._launched.contract), "--format", str(self._folder.format))
        assert isinstance(folder, Path)  # it is in clear (`build_for`)
        try:
            self._install(self._shelf, opened.digest, build, folder, question)
        except ModelRefused as refusal:
            self._keep(slots.refused(self._known, opened.digest, str(refusal), counter))
            raise

    def activate(self, manifest: Manifest, release: str, served: Iterable[str], counter: int, *, online: bool) -> None:
        """From the next start on, which follows at once."""
        if not is_agent(manifest):
            raise TrustError(f"release {release[:12]} is of {manifest.model}, and no agent")
        models = tuple(model for model in served if model != AGENT)
        self._keep(slots.activated(self._known, release, models, counter, __version__, offline=not online))
        log.warning("the agent starts again, as release %s", release[:12])
        self._restart()

    def commit(self) -> None:
        """This version is healthy: from now on its word goes for the folder's format, too."""
        self._folder.settle_format()
        self._keep(slots.committed(self._known))
        signal.alarm(0)
        self._starts_before = 0
        log.info("the agent is committed to release %s", self.release[:12])

    def roll_back(self, reason: str) -> None:
        """This version is not: the one before starts, at once."""
        log.error("the agent goes back from release %s: %s", self.release[:12], reason)
        self._keep(slots.given_up(self._known, reason))
        self._restart()

    def obey(self, counter: int) -> None:
        """A statement was believed."""
        self._keep(slots.obeying(self._known, counter))

    def found_healthy(self) -> None:
        """This start is a good one. A trial is committed by `commit` alone."""
        if not self.on_trial and self._known.running == self.release and self._known.starts:
            self._keep(slots.committed(self._known))
            self._starts_before = 0

    def stopped(self) -> None:
        """We end because we were asked to: this start is neither good nor bad."""
        if self._known.starts > self._starts_before:
            try:
                self._keep(slots.stopped(self._known, self.release))
            except OSError as error:
                log.warning("cannot write versions.json, this start stays counted: %s", error.strerror)

    def clean(self, wanted: Iterable[str]) -> None:
        """Drop versions that neither may start again nor are wanted."""
        if self._launched is not None:
            self._shelf.keep({*self.kept, *wanted})

    def _keep(self, versions: Versions) -> None:
        """OSError where the disk does not take it; then nothing has changed."""
        with self._lock:
            if versions != self._known:
                self._shelf.write(versions)
                self._known = versions
