"""What a gateway's agent does with releases that it serves for other devices, and to whom an agent offloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgesplit.errors import TrustError, UsageError
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.release.manifest import DesiredRelease, Gateway, Statement
from edgesplit.trust.revocation import authority_key, parse_revocation_list
from edgesplit_agent.control.gateway_server import listen_address
from edgesplit_agent.offload.gateway_route import GatewayRoute
from edgesplit_agent.updates.reconciler import (
    Activate,
    CollectGarbage,
    DeviceState,
    FetchManifest,
    FetchMissing,
    ReleaseProgress,
    Stage,
    Step,
    Verify,
    kept_states,
    next_step,
)
from edgesplit_controller.pki.authority import Authority

A, B = "a" * 64, "b" * 64
FETCHED = ReleaseProgress(manifest=True, whole=True)
HERE = replace(FETCHED, staged=True)
RUNNING = replace(HERE, verified=True)
GATEWAY = Gateway("gw", "10.0.0.7:8500")


def want(own: str = "", *kept: str) -> Statement:
    releases = (DesiredRelease("m", own),) if own else ()
    keeps = tuple(DesiredRelease("m", release) for release in kept)
    return Statement(device="gw", releases=releases, counter=1, expires=2**40, gateway_releases=keeps)


def have(**releases: ReleaseProgress) -> DeviceState:
    return DeviceState(online=True, releases={name * 64: state for name, state in releases.items()})


@pytest.mark.parametrize(
    ("statement", "state", "expected"),
    [
        (want("", A), have(), FetchManifest(A)),
        (want("", A), replace(have(), online=False), None),
        (want("", A), have(a=ReleaseProgress(manifest=True)), FetchMissing(A)),
        (want("", A), replace(have(a=FETCHED), online=False), Stage(A)),
        (want("", A), have(a=HERE), None),  # neither loaded nor activated: it runs in another process
        (want("", A), replace(have(a=HERE), litter=True), CollectGarbage()),
        (want("", A, B), replace(have(a=HERE), litter=True), FetchManifest(B)),
        (want("", A, B), replace(have(a=HERE, b=replace(FETCHED, retry_at=9.0)), litter=True), None),
        (want("", A, B), replace(have(a=HERE, b=ReleaseProgress(refused="forged")), litter=True), CollectGarbage()),
        (want(B, A), have(b=HERE), Verify(B)),  # its own model goes first
        (want(B, A), have(b=RUNNING), Activate("m", B)),
        (want(B, A), replace(have(b=RUNNING), running={"m": B}), FetchManifest(A)),
        (want(A, A), replace(have(a=FETCHED), running={"m": A}), Stage(A)),  # it runs, and far slices came since
        (want("", A), replace(have(), safe_mode="three bad starts", held=frozenset({A})), FetchManifest(A)),
    ],
)
def test_served_releases_are_fetched_and_staged_only(
    statement: Statement, state: DeviceState, expected: Step | None
) -> None:
    """The next step, for a gateway that serves releases beside a model of its own, or with none."""
    assert next_step(statement, state, 1.0) == expected


def test_progress_of_served_releases_is_reported() -> None:
    """Present, in progress, or refused and why."""
    state = have(a=HERE, b=ReleaseProgress(refused="forged"))
    told = [(one.release, one.state, one.detail) for one in kept_states(want("", A, B, "c" * 64), state)]
    assert told == [(A, "staged", ""), ("", "failed", "forged"), ("", "fetching", "")]


def target(remote: OffloadClient) -> tuple[str, tuple[str, int]]:
    return remote._name, (remote._address.host, remote._address.port)


def test_statement_selects_the_gateway() -> None:
    """With the gateway's name, at the address in the statement; without one, where the device enrolled."""
    remote = OffloadClient("https://cloud.example:8500")
    way = GatewayRoute(remote, None)
    way.use(GATEWAY)
    assert target(remote) == ("gw.gateway.edgesplit", ("10.0.0.7", 8500)) and way.gateway == "gw"
    way.use(Gateway("gw", "[fd00::7]:9000"))
    assert target(remote)[1] == ("fd00::7", 9000)
    way.use(None)
    assert target(remote) == ("cloud.example", ("cloud.example", 8500)) and way.gateway == ""


def test_offload_option_overrides_the_statement() -> None:
    """An invalid address in the statement changes nothing."""
    remote = OffloadClient("http://127.0.0.1:8000")
    GatewayRoute(remote, None, is_fixed=True).use(GATEWAY)
    assert target(remote)[1] == ("127.0.0.1", 8000)
    way = GatewayRoute(remote, None)
    way.use(Gateway("gw", "nowhere"))
    assert target(remote)[1] == ("127.0.0.1", 8000) and way.gateway == ""
    GatewayRoute(None, None).use(GATEWAY)


def test_emulated_link_applies_to_the_gateway() -> None:
    """The device's first link is shaped, whatever server it leads to."""
    remote = OffloadClient("https://cloud.example:8500")
    way = GatewayRoute(remote, ("127.0.0.1", 1), link="8mbit/1ms")
    try:
        way.use(GATEWAY)
        name, address = target(remote)
        assert name == "gw.gateway.edgesplit" and address[0] == "127.0.0.1" and address[1] != 1
        way.use(None)
        assert target(remote) == ("cloud.example", ("127.0.0.1", 1))
    finally:
        way.stop()


def test_only_the_authoritys_revocation_list_counts(tmp_path: Path) -> None:
    """Another authority's list, garbage, and a truncated one are refused."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    (tmp_path / "ca.pem").write_text(ours.ca_pem)
    key = authority_key(tmp_path / "ca.pem")
    listed = ours.revocation_list([7, 9])
    assert parse_revocation_list(listed, key).serials == {7, 9}
    assert parse_revocation_list(ours.revocation_list([]), key).serials == set()
    for wrong in (theirs.revocation_list([7]), b"", b"-----BEGIN X509 CRL-----", listed[:-40]):
        with pytest.raises(TrustError):
            parse_revocation_list(wrong, key)


def test_gateway_listen_address_is_parsed() -> None:
    """:PORT is every address of the machine."""
    assert listen_address(":8500") == ("0.0.0.0", 8500)
    assert listen_address("[::1]:80") == ("::1", 80)
    for wrong in ("", ":", "8500", ":0", "gw", ":eighty"):
        with pytest.raises(UsageError):
            listen_address(wrong)
