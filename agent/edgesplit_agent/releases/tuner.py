"""Tunes a release that is loaded and has answered its golden inputs: the hands of `tuning`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import msgspec

from edgesplit.errors import EdgeError
from edgesplit.runtime import Tensors
from edgesplit.runtime.options import Setup
from edgesplit_agent.releases.loaded_release import ActiveRelease
from edgesplit_agent.releases.tuning import BUDGET_S, Allowed, Memory, load_per_core, time_of, tuned
from edgesplit_agent.worker.supervised_host import Hosted

log = logging.getLogger(__name__)


class Tuner:
    """Of one device."""

    def __init__(
        self,
        memory: Memory,
        allowed: Allowed,
        budget_s: float = BUDGET_S,
        load: Callable[[], float] = load_per_core,
    ) -> None:
        """`load`: of the machine for each core, before anything is measured."""
        self._memory = memory
        self._load = load
        self._allowed = allowed
        self._budget_s = budget_s

    def setup_of(self, release: str, default: Setup) -> Setup:
        """What was found out of that release here before, with the accelerators of `default`; else that."""
        found = self._memory.setup_of(release, self._allowed)
        return found if found is not None and found.providers == default.providers else default

    def tune(self, active: ActiveRelease, inputs: Tensors, check: Callable[[], None], *, alone: bool = True) -> None:
        """Find out how it runs best, over inputs that an application could give, and run it so from now on. `check`
        raises where its answers are not right any more; `alone`: no other release serves here. Nothing is done twice,
        unless the machine was busy then and is quiet now, nor for a release that runs in no worker."""
        host = active.host
        rows = sorted(active.plan.rows, key=lambda row: (row.is_local, len(row.device)))
        order = active.order(rows[-1].device)
        if not isinstance(host, Hosted) or host.emulated or not order:
            return
        load = self._load()
        if not self._memory.is_due(active.digest, self._allowed, load):
            return
        first, began = host.setup, perf_counter()

        def measure(setup: Setup) -> float | None:
            try:
                if setup != host.setup:
                    host.use(setup)
                if setup.merge and not host.merged:
                    return None
                seconds = time_of(lambda: active.run(order, inputs))
                check()
                return seconds
            except EdgeError as error:
                log.warning("release %s does not run with %s: %s", active.digest[:12], setup, error)
                return None

        allowed = replace(self._allowed, alone=alone)
        best, times = tuned(first, allowed, measure, lambda: perf_counter() - began > self._budget_s)
        try:
            host.use(best)
            check()
        except EdgeError as error:
            log.warning("release %s does not run with %s after all: %s", active.digest[:12], best, error)
            best = first
            host.use(best)
            check()
        log.info("release %s runs with %s", active.digest[:12], best)
        self._memory.keep(active.digest, best, times, load)

    @staticmethod
    def calm(active: ActiveRelease) -> None:
        """No spinning any more: another release serves here too."""
        host = active.host
        if isinstance(host, Hosted) and host.setup.spinning:
            try:
                host.use(msgspec.structs.replace(host.setup, spinning=False))
            except EdgeError as error:
                log.warning("release %s keeps spinning: %s", active.digest[:12], error)
