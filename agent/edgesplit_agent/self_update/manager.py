"""The agent's own version as a component that the reconciler updates: fetched, staged, verified, put on trial,
committed like a model's release.

Guarantees: what is installed was verified immediately before, by the release's own chain of signatures; every change is
on disk before this process ends for it; without a launcher nothing changes. The order of steps is the reconciler's
(`updates`), starting a version is the launcher's.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from edgesplit import __version__
from edgesplit.errors import ModelRefused, TrustError, UsageError
from edgesplit.release.agent_release import AGENT_MODEL, Build, build_for, is_agent_release, this_machine
from edgesplit.release.manifest import Manifest
from edgesplit.release_store import StoredRelease
from edgesplit_agent.self_update import version_slots
from edgesplit_agent.self_update.launcher import LaunchContext
from edgesplit_agent.self_update.version_slots import Versions
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.state.data_folder import DataFolder

log = logging.getLogger(__name__)

NO_LAUNCHER = (
    "this agent was not started by `edgesplit-agent launch`, so it cannot change its own version: start it with that"
    " command (as the service of install.sh does), or install the version with a kit"
)
"""Error text where the agent was started without the launcher."""


Install = Callable[[VersionStore, str, Build, Path, "tuple[str, ...]"], None]
"""Type of `install.install_version`."""


def _install_version(
    store: VersionStore, release: str, build: Build, folder: Path, check_arguments: tuple[str, ...]
) -> None:
    """Call `install.install_version`; its imports are loaded only when a version is installed."""
    from edgesplit_agent.self_update.install import install_version  # imported late: rarely needed

    install_version(store, release, build, folder, check_arguments)


class VersionManager:
    """The version that this process is, and the versions installed beside it. Used by the reconciler's thread alone,
    except `on_stopped`."""

    def __init__(
        self,
        folder: DataFolder,
        context: LaunchContext | None = None,
        restart: Callable[[], None] = lambda: None,
        install: Install = _install_version,
    ) -> None:
        """`restart` requests an orderly end of this process, after which the launcher selects the version again."""
        self._install = install
        self._folder = folder
        self._store = VersionStore(folder.path)
        self._context = context
        self._restart = restart
        self._lock = threading.Lock()
        self._versions = self._store.read() if context is not None else Versions()
        self._starts_before = max(0, self._versions.unhealthy_starts - 1)

    @property
    def release(self) -> str:
        """Release of the version that this process runs; empty for the installed version."""
        return self._context.release if self._context is not None else version_slots.INSTALLED

    @property
    def built_for(self) -> str:
        """Tag of the builds that fit this machine; empty where no launcher could start one."""
        return this_machine().tag if self._context is not None else ""

    @property
    def on_trial(self) -> bool:
        """Whether this process runs the version on trial."""
        return bool(self.release) and self._versions.trial == self.release

    @property
    def served(self) -> frozenset[str]:
        """The models that answered before the trial."""
        return frozenset(self._versions.served)

    @property
    def offline(self) -> bool:
        """Whether the version before the one on trial had no connection to the broker."""
        return self._versions.offline

    @property
    def running(self) -> dict[str, str]:
        """The running release by model name, as for models: `AGENT` and this release, or empty for the installed
        version."""
        return {AGENT_MODEL: self.release} if self.release else {}

    @property
    def committed(self) -> dict[str, str]:
        """The committed release by model name: `AGENT` and the release last found healthy, or empty."""
        return {AGENT_MODEL: self._versions.committed} if self._versions.committed else {}

    @property
    def protected(self) -> set[str]:
        """Releases that may have to start again, and are therefore never removed."""
        return {self.release, self._versions.committed, self._versions.trial} - {version_slots.INSTALLED}

    def write_format(self) -> None:
        """Raise the data folder's format to this version's, unless it is on trial. A disk error is logged, so that a
        full disk does not prevent the start."""
        if self.on_trial:
            return
        try:
            self._folder.write_format()
        except OSError as error:
            log.warning("the data folder keeps its older format: %s", error.strerror)

    def bad_reason(self, release: str) -> str | None:
        """Reason why that release is not tried again; None where there is none."""
        return self._versions.rejected.get(release)

    def refusal_reason(self, release: str) -> str | None:
        """Reason why that release was refused before it ever ran; None where it was not."""
        return self._versions.refused.get(release)

    def slices(self, manifest: Manifest) -> set[str]:
        """Names of the slices that this machine needs of an agent release. UsageError where no build fits this machine,
        or no launcher could start it."""
        if self._context is None:
            raise UsageError(NO_LAUNCHER)
        return {build_for(manifest, this_machine()).slice.name}

    def verify(self, opened: StoredRelease, counter: int) -> None:
        """Install the release beside this version and run its version check. `counter` is that of the statement that
        requests it. ModelRefused, which is recorded, where it cannot run here; UsageError without a launcher."""
        if self._context is None:
            raise UsageError(NO_LAUNCHER)
        build = build_for(opened.manifest, this_machine())
        folder = opened.slice_folder(build.slice.name)
        check_arguments = ("--launcher", str(self._context.contract), "--format", str(self._folder.format))
        assert isinstance(folder, Path)  # an agent release is never encrypted (`build_for`)
        try:
            self._install(self._store, opened.digest, build, folder, check_arguments)
        except ModelRefused as refusal:
            self._persist(version_slots.with_refusal(self._versions, opened.digest, str(refusal), counter))
            raise

    def activate(self, manifest: Manifest, release: str, served: Iterable[str], counter: int, *, online: bool) -> None:
        """Make the release the version of the next start, and restart at once. TrustError where the release is no
        agent."""
        if not is_agent_release(manifest):
            raise TrustError(f"release {release[:12]} is of model {manifest.model}, not of the agent")
        models = tuple(model for model in served if model != AGENT_MODEL)
        self._persist(
            version_slots.with_activated(self._versions, release, models, counter, __version__, offline=not online)
        )
        log.warning("the agent restarts as release %s", release[:12])
        self._restart()

    def commit(self) -> None:
        """Commit this version: it was found healthy. It may write its own format of the data folder from now on, and
        the launcher's alarm is cancelled."""
        self._folder.write_format()
        self._persist(version_slots.with_trial_committed(self._versions))
        signal.alarm(0)
        self._starts_before = 0
        log.info("the agent is committed to release %s", self.release[:12])

    def roll_back(self, reason: str) -> None:
        """Mark this version as bad and restart at once, as the version before it."""
        log.error("the agent rolls back from release %s: %s", self.release[:12], reason)
        self._persist(version_slots.with_rollback(self._versions, reason))
        self._restart()

    def on_statement(self, counter: int) -> None:
        """Adopt the counter of an accepted statement."""
        self._persist(version_slots.with_statement(self._versions, counter))

    def mark_start_healthy(self) -> None:
        """Clear the count of starts, unless this version is on trial: a trial is committed by `commit` alone."""
        if not self.on_trial and self._versions.running == self.release and self._versions.unhealthy_starts:
            self._persist(version_slots.with_trial_committed(self._versions))
            self._starts_before = 0

    def on_stopped(self) -> None:
        """The agent was asked to end: this start counts neither as healthy nor as unhealthy. May be called from any
        thread."""
        if self._versions.unhealthy_starts > self._starts_before:
            try:
                self._persist(version_slots.with_start_uncounted(self._versions, self.release))
            except OSError as error:
                log.warning("cannot write versions.json, this start stays counted: %s", error.strerror)

    def collect_garbage(self, wanted: Iterable[str]) -> None:
        """Remove the versions that are neither wanted nor protected."""
        if self._context is not None:
            self._store.remove_others({*self.protected, *wanted})

    def _persist(self, versions: Versions) -> None:
        """Write the state and adopt it. OSError where the disk refuses; then nothing has changed."""
        with self._lock:
            if versions != self._versions:
                self._store.write(versions)
                self._versions = versions
