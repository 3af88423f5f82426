"""Fetches and stages from a release bundle what its statement wants on this device. Whether an agent runs beside it
makes no difference: nothing is loaded or activated here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import LinkError, UsageError
from edgesplit.release.manifest import Statement
from edgesplit_agent.updates.assignment import Assignment
from edgesplit_agent.updates.bundle.fetcher import BundleFetcher
from edgesplit_agent.updates.bundle.reader import open_bundle
from edgesplit_agent.updates.release_installer import ReleaseInstaller

log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Callback on progress: bytes of a release copied from the bundle, and their total."""


@dataclass(frozen=True)
class BundleImporter:
    """Applies release bundles to one device."""

    device: str
    assignment: Assignment
    installer: ReleaseInstaller
    on_progress: OnProgress

    def apply(self, path: Path, on_statement: Callable[[Statement], None], superseded: Callable[[], bool]) -> str:
        """Accept the statement of the bundle at that path, which is passed to `on_statement`, then fetch and stage from
        the bundle every release that the statement wants and that is not here.

        Returns for people which releases the bundle lacks, which the network may bring; empty for none. Nothing is
        copied unless there is room for all of it.
        """
        fetcher = BundleFetcher(open_bundle(path), self.on_progress)
        try:
            fetcher.index()
            raw = fetcher.statement(self.device)
            on_statement(self.assignment.accept(raw, fetcher.fetch, from_bundle=True))
            wanted = [release for release in sorted(self.assignment.wanted) if self._is_missing(release)]
            carried = [release for release in wanted if self._fetch_manifest(release, fetcher)]
            self.installer.make_room(carried)
            for release in carried:
                if superseded() or not self.installer.fetch_missing(release, superseded, fetcher):
                    break
                self.installer.stage(release)
            missing = [release[:12] for release in wanted if not self.installer.progress(release).staged]
        finally:
            fetcher.close()
        return f"not in the bundle, or not for this device as it runs now: {', '.join(missing)}" if missing else ""

    def _is_missing(self, release: str) -> bool:
        """Whether the release is neither complete on disk nor refused."""
        progress = self.installer.progress(release)
        return not (progress.staged and progress.whole) and not progress.refused

    def _fetch_manifest(self, release: str, fetcher: BundleFetcher) -> bool:
        """Fetch the release's manifest from the bundle; False where the bundle lacks it, or the release does not fit
        this machine as it runs now."""
        try:
            self.installer.fetch_manifest(release, fetcher.fetch)
        except (LinkError, UsageError) as error:
            log.warning("release %s is not applied from the bundle: %s", release[:12], error)
            return False
        return True
