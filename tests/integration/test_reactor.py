"""Many sessions at a real broker in one thread: one that ends takes none of the others along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit.testing.mqtt_reactor import Reactor, ReactorSession
from support.mosquitto import BrokerHarness, enrol

PATIENCE_S = 60.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[BrokerHarness]:
    made = BrokerHarness(tmp_path)
    made.broker.start()
    yield made
    made.close()


def test_a_connection_that_breaks_during_a_ping_is_reconnected(world: BrokerHarness) -> None:
    """The client library closes the socket then and calls it a success: the thread of all goes on, and the one session
    comes again."""
    reactor = Reactor()
    sessions = {}
    try:
        for name in ("cam", "other"):
            tls = enrol(world.authority, world.folder, name).client_context()
            sessions[name] = reactor.session("localhost", world.broker.port, name, tls, on_message=lambda *_: None)
            sessions[name].start()
        assert reactor.hub.run(PATIENCE_S, lambda: all(one.connected for one in sessions.values()))
        breaks_at_its_next_ping(sessions["cam"])
        assert not sessions["cam"]._do_network_io(False, False)
        assert reactor.hub.run(PATIENCE_S, lambda: reactor.connects == 3 and sessions["cam"].connected)
        assert sessions["other"].connected
        for one in sessions.values():
            one.stop()
    finally:
        reactor.close()


def breaks_at_its_next_ping(session: ReactorSession) -> None:
    """Its next look whether a ping is due finds the connection broken."""
    client = session._client
    check = client._check_keepalive

    def broken() -> None:
        client._check_keepalive = check  # type: ignore[method-assign]
        client._sock_close()

    client._check_keepalive = broken  # type: ignore[method-assign]
