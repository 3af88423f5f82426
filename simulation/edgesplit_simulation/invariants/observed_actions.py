"""The hands of an update loop, watched: what a device believes is told to the witness."""

from __future__ import annotations

from collections.abc import Callable

from edgesplit.mqtt.messages import ModelState
from edgesplit.release.manifest import Statement
from edgesplit_agent.updates.reconciler import Hands, ReleaseState, Standing
from edgesplit_simulation.invariants.checker import Witness


class Watched:
    """`updates.Hands`, passed on."""

    def __init__(self, hands: Hands, device: str, witness: Witness) -> None:
        self._hands, self._device, self._witness = hands, device, witness
        self.fetch_manifest = hands.fetch_manifest
        self.take_bundle = hands.take_bundle
        self.stage, self.verify, self.activate = hands.stage, hands.verify, hands.activate
        self.check_again, self.commit, self.roll_back = hands.check_again, hands.commit, hands.roll_back
        self.find_healthy, self.retire, self.clean = hands.find_healthy, hands.retire, hands.clean

    def consider(self, raw: bytes) -> Statement:
        """Told, where it is believed."""
        statement = self._hands.consider(raw)
        self._witness.believed(self._device, statement.counter)
        return statement

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Passed on."""
        return self._hands.fetch_missing(release, superseded)

    def standing(self) -> Standing:
        """Passed on."""
        return self._hands.standing()

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str,
        trouble: str,
        kept: tuple[ModelState, ...],
    ) -> None:
        """Passed on."""
        self._hands.report(counter, models, safe_mode, trouble, kept)

    def look(self, release: str) -> ReleaseState:
        """Passed on."""
        return self._hands.look(release)
