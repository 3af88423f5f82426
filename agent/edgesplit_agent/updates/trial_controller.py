"""Puts releases into their slots: on trial, committed once healthy, rolled back otherwise (`state.slots`). What must
survive a crash is on disk before the engine goes by it, except for a rollback, which serves first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from edgesplit.errors import EdgeError, TrustError
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_agent.releases.golden_result import GoldenResult
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.state import slots
from edgesplit_agent.state.activation_store import ActivationStore
from edgesplit_agent.state.slots import Current
from edgesplit_agent.updates.reconciler import InstalledState
from edgesplit_agent.updates.release_loader import ReleaseLoader, ServingEngine, TriedRelease

log = logging.getLogger(__name__)

OnActivated = Callable[[str, str, "Drift | None", "GoldenResult | None"], None]
"""Callback on an activation: model, release, its drift from the release before, and what its golden inputs showed
(None: it has none that can run on this device alone)."""


@dataclass
class TrialController:
    """The slots of all models and of this start, the engine that serves them, and the agent's own version beside
    them."""

    activation: ActivationStore
    loader: ReleaseLoader
    engine: ServingEngine
    version_manager: VersionManager
    check_endpoint: Callable[[], None]
    on_activated: OnActivated
    loaded: dict[str, TriedRelease] = field(default_factory=dict)
    """By release that is loaded and does not serve yet."""
    starts_before: int = 0
    """Starts to which the count returns if this one is interrupted before it is healthy."""

    def count_start(self, stored: Current) -> None:
        """Count this start on disk before anything is loaded. A disk error does not prevent the start."""
        self.starts_before = stored.unhealthy_starts
        # While a version of the agent is on trial, an unhealthy start is that version's fault and was counted by the
        # launcher: counting it here too would roll back the models' releases for it.
        counted = stored if self.version_manager.on_trial else slots.with_start_counted(stored)
        if counted.unhealthy_starts == 1:  # the count has led to a rollback or to safe mode, and begins anew
            self.starts_before = 0
        for release in sorted(set(counted.rejected) - set(stored.rejected)):
            log.error("release %s is not loaded again: %s", release[:12], counted.rejected[release])
        self.activation.update_best_effort(counted, "this start is not counted")

    def serve_stored(self) -> None:
        """Serve what ran last; nothing in safe mode.

        A release on trial whose slices are damaged is replaced by the committed one; a model without an undamaged
        release is left out and fetched again; the other models go on.
        """
        current = self.activation.current
        if current.safe_mode is not None:
            log.error("safe mode, no model is loaded: %s", current.safe_mode.reason)
            return
        for model, stored in list(current.models.items()):
            if self._try_serve(model, stored.running) or not stored.trial:
                continue
            without_trial = slots.without_trial(self.activation.current, model)
            self.activation.update_best_effort(without_trial, "the release on trial is corrupt on disk")
            if stored.committed:
                self._try_serve(model, stored.committed)
        self.loader.stop_spinning()

    def _try_serve(self, model: str, release: str) -> bool:
        """Load a release and serve it; False, with the reason in the log, if it cannot be loaded."""
        try:
            self.engine.serve(model, self.loader.load(release))
        except (EdgeError, OSError) as error:
            log.error("%s cannot be served from release %s as it is here: %s", model, release[:12], error)
            return False
        log.info("serving %s from release %s", model, release[:12])
        return True

    def on_stopped(self) -> None:
        """The agent was asked to end: this start counts neither as healthy nor as unhealthy."""
        self.version_manager.on_stopped()
        if self.activation.current.unhealthy_starts > self.starts_before:
            self.activation.update_best_effort(
                slots.with_start_uncounted(self.activation.current, self.starts_before), "this start stays counted"
            )

    def installed(self) -> InstalledState:
        """What is on disk and what the engine serves."""
        current = self.activation.current
        own = self.version_manager
        running = {model: active.digest for model, active in self.engine.serving.items()}
        trials = {model: stored.trial for model, stored in current.models.items() if stored.trial}
        committed = {model: stored.committed for model, stored in current.models.items() if stored.committed}
        return InstalledState(
            running={**running, **own.running}, trials={**trials, **(own.running if own.on_trial else {})},
            committed={**committed, **own.committed}, served_before=own.served, offline_before=own.offline,
            held=frozenset(current.safe_mode.held if current.safe_mode else ()),
            safe_mode=current.safe_mode.reason if current.safe_mode else "", starts=current.unhealthy_starts,
        )  # fmt: skip

    def verify(self, release: str) -> None:
        """Load the release and run its golden inputs; the loaded release is the one that `activate` serves.

        The attempt is recorded on disk before: a load that ends this process is not repeated once it has happened
        `UNHEALTHY_STARTS` times.
        """
        self.activation.update(slots.with_load_started, release)
        try:
            loaded = self.loader.load_and_try(release)
        # Only exceptions: a load that ends the process never gets here, so its attempt stays counted on disk.
        except Exception:
            self._record_load_finished(release)
            raise
        self._record_load_finished(release)
        self.loaded[release] = loaded

    def _record_load_finished(self, release: str) -> None:
        finished = slots.with_load_finished(self.activation.current, release)
        self.activation.update_best_effort(finished, "this attempt stays counted")

    def activate(self, model: str, release: str) -> None:
        """Activate by one rename of `current.json`, then let the engine serve the release. The release that ran before
        stays complete on disk."""
        tried = self.loaded.get(release) or self.loader.load_untried(release)
        active = tried.release
        if active.model != model:
            raise TrustError(f"release {release[:12]} is of model {active.model!r}, not of {model!r}")
        self.activation.update(slots.with_activated, model, release)
        self.engine.serve(model, active)
        self.loaded.pop(release, None)
        self.on_activated(model, release, tried.drift, tried.golden)
        on_trial = ", on trial" if self.activation.current.models[model].trial else ""
        log.info("activated %s from release %s%s", model, release[:12], on_trial)

    def reverify(self, model: str) -> None:
        """Run the golden inputs on the serving release again; InferenceFailed where it fails them."""
        active = self.engine.serving.get(model)
        if active is not None:
            self.loader.run_golden(active)

    def commit(self, model: str) -> None:
        """Commit the release or the agent's version on trial, once the local endpoint has answered."""
        self.check_endpoint()
        if model == AGENT_MODEL:
            return self.version_manager.commit()
        self.activation.update(slots.with_trial_committed, model)
        current = self.activation.current
        if not current.unhealthy_starts:  # no model is on trial any more: this start counts as healthy
            self.version_manager.mark_start_healthy()
        self.starts_before = min(self.starts_before, current.unhealthy_starts)
        log.info("%s is committed to release %s", model, current.models[model].committed[:12])

    def roll_back(self, model: str, reason: str) -> None:
        """Serve the committed release again, then record the rollback on disk.

        In this order, a power cut between the two only tries the bad release once more, and that start is counted.
        Where no committed release can be loaded the model is not served: no answer is better than a wrong one.
        """
        if model == AGENT_MODEL:
            return self.version_manager.roll_back(reason)
        stored = self.activation.current.models[model]
        log.error("%s rolls back from release %s: %s", model, stored.trial[:12], reason)
        serving = self.engine.serving.get(model)
        is_already_back = serving is not None and serving.digest == stored.committed
        if not is_already_back and not (stored.committed and self._try_serve(model, stored.committed)):
            self.engine.drop(model)
        self.activation.update(slots.with_rollback, model, reason)

    def mark_start_healthy(self) -> None:
        """Clear the count of starts, once the local endpoint has answered."""
        self.check_endpoint()
        self.version_manager.mark_start_healthy()
        self.activation.update(slots.with_start_healthy)
        self.starts_before = 0

    def retire(self, model: str) -> None:
        """Stop serving a model that no statement wants here."""
        self.activation.update(slots.without_model, model)
        self.engine.drop(model)
        log.info("retired %s", model)

    def drop_unserved(self, wanted: Collection[str]) -> None:
        """Drop the models that are not wanted and were never served in this run, because they are damaged on disk."""
        for model in set(self.activation.current.models) - set(wanted) - set(self.engine.serving):
            self.activation.update(slots.without_model, model)

    def unload_others(self, needed: Collection[str]) -> None:
        """End the loaded releases that are not needed and do not serve."""
        for release in set(self.loaded) - set(needed):
            self.loaded.pop(release).release.retire()
