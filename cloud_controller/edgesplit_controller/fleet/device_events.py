"""Consequences of what devices send: acknowledgements, revocations, ended sessions, new statements for gateways.

Rows are written by `fleet.devices` in one transaction; everything here follows after its commit, so a process that dies
in between leaves only what housekeeping completes. Broker, revocation list and rollouts are reached through callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from edgesplit.mqtt.messages import Ack, Reported
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.fleet.ingest import IngestResult, Received


@dataclass(frozen=True, slots=True)
class DeviceEvents:
    """Handlers of device messages and of floods, for `messaging.delivery`."""

    devices: Devices
    acknowledge: Callable[[Collection[tuple[str, Ack]]], None]
    """Sends acknowledgements for stored telemetry."""
    end_session: Callable[[str], None]
    """Ends the broker session of a device."""
    publish_revocations: Callable[[], None]
    clear_retained: Callable[[Collection[str]], None]
    """Clears what the broker retains of removed devices."""
    on_reports: Callable[[], None]
    """Called when devices reported their state: gateways may drop releases, rollouts may go on."""
    on_ingested: Callable[[IngestResult, float], None] = lambda _result, _seconds: None
    """Called with the result of each batch, and the seconds it took until the acknowledgements were sent."""

    def on_messages(self, received: Received) -> None:
        """Store a batch of messages, then act on it."""
        started_s = time.perf_counter()
        result = self.devices.ingest(received)
        self.acknowledge(result.acks)
        self.on_ingested(result, time.perf_counter() - started_s)
        if result.superseded:
            self.publish_revocations()
        for device in result.intruders:
            self.end_session(device)
        # At once, and not by the row alone: the acknowledgement of an earlier clearing may still be on its way, and
        # would be noted as that of this message.
        if result.removed:
            self.clear_retained(result.removed)
        if any(isinstance(message, Reported) for _, message in received):
            self.on_reports()

    def on_flood(self, device: str, dropped: int, unseen_bytes: int = 0) -> None:
        """Quarantine a device that floods: refuse its certificates, and end its session."""
        if self.devices.quarantine(device, dropped, unseen_bytes):
            self.publish_revocations()
            self.end_session(device)
