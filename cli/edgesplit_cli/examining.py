"""What `edgectl doctor` looks at: the controller as an operator sees it, step by step, each with what to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import edgesplit
from edgesplit.errors import EdgeError
from edgesplit_agent.service.findings import Finding, bad, good, warning
from edgesplit_agent.service.seen_way import reach
from edgesplit_cli import credentials
from edgesplit_cli.api import Api
from edgesplit_cli.credentials import Credentials
from edgesplit_cli.settings import chosen_credentials
from edgesplit_cli.show import size

LITTLE_DISK_BYTES = 2 << 30
NO_DISK_BYTES = 200 << 20
SLOW_DATABASE_S = 1.0
SOON_S = 14 * 86_400.0


def examine(data: Path, now: float | None = None) -> Iterator[Finding]:
    """All findings; where the controller is not reached or does not know us, what would need it is left out."""
    now = time.time() if now is None else now
    try:
        file = chosen_credentials(data)
        held = credentials.read(file) if file else credentials.of_folder(data)
    except EdgeError as error:
        yield bad("credentials", str(error), "edgectl up on this machine, or edgectl login FILE for one elsewhere")
        return
    yield _credentials(held, file or data, now)
    way = list(reach("controller", held.url, None, now, ca_pem=held.ca_pem))
    yield from way
    if any(one.level == "bad" for one in way):
        return
    api = Api.by(held)
    try:
        you = api.get("/v1/session")
        own = api.get("/v1/condition")
        keys = api.get("/v1/keys")
        fleet = api.get("/v1/fleet")
    except EdgeError as error:
        yield bad("access", str(error), "an admin makes new credentials: edgectl operator add; then edgectl login FILE")
        return
    yield good("access", f"{you['operator']} ({you['role']})")
    yield _version(own["version"])
    yield from _places(own, held, now)
    yield _database(own["database"])
    yield from _disk(own["disk"])
    yield from _keys(keys)
    counted = ", ".join(f"{number} {state}" for state, number in fleet["devices"].items() if number) or "none yet"
    yield good("devices", counted)


def _credentials(held: Credentials, place: Path, now: float) -> Finding:
    if held.expires is not None and held.expires < now + SOON_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(held.expires))
        return warning("credentials", f"{place}: until {day}", "an admin makes new ones: edgectl operator add")
    return good("credentials", f"{held.operator} at {held.url}, from {place}")


def _version(theirs: str) -> Finding:
    if theirs != edgesplit.__version__:
        todo = "install the same version here and there: pip install edgesplit[cli]==..."
        return warning("version", f"the controller is {theirs}, this edgectl {edgesplit.__version__}", todo)
    return good("version", theirs)


def _places(own: Mapping[str, Any], held: Credentials, now: float) -> Iterator[Finding]:
    """Broker and offload server: as the controller sees them, and as whoever stands here does."""
    addresses = own["addresses"]
    if own["broker_connected"] is False:
        yield bad("broker", "the controller has no session with it", "its log says why; with --broker: is it running?")
    elif broker := addresses.get("broker"):
        yield from reach("broker", f"mqtts://{broker}", None, now, ca_pem=held.ca_pem, enters=False)
    if offload := addresses.get("offload"):
        yield from reach("offload", offload, None, now, ca_pem=held.ca_pem, enters=False)


def _database(told: Mapping[str, Any]) -> Finding:
    said = f"{told['kind']} in {1000 * float(told['seconds']):.0f} ms"
    if told["problem"]:
        return bad("database", f"{told['kind']}: {told['problem']}", "is its server running, is its disk full?")
    if told["seconds"] > SLOW_DATABASE_S:
        return warning("database", said, "is its disk or its server overloaded?")
    return good("database", said)


def _disk(told: Mapping[str, int] | None) -> Iterator[Finding]:
    if told is None:
        return
    said = f"{size(told['free_bytes'])} of {size(told['bytes'])} free for the controller's data"
    if told["free_bytes"] < NO_DISK_BYTES:
        yield bad("disk", said, "free some at once: nothing can be released, and devices' words are lost")
    elif told["free_bytes"] < LITTLE_DISK_BYTES:
        yield warning("disk", said, "free some, or move its data folder to a larger disk (edgectl backup, restore)")
    else:
        yield good("disk", said)


def _keys(told: Mapping[str, Any]) -> Iterator[Finding]:
    """What is due; above all, that the root key still lies where everybody on that machine could take it."""
    notices = [str(one) for one in told["notices"]]
    for notice in notices:
        yield warning("keys", notice, "edgectl keys show; edgectl keys init --folder DIR moves the root key away")
    if not notices:
        yield good("keys", "nothing is due, and the root key is not on the controller")
