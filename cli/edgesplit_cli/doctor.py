"""What `edgectl doctor` looks at: the controller as an operator sees it, step by step, each with what to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import edgesplit
from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.credentials import Credentials
from edgesplit.errors import EdgeError
from edgesplit_agent.service.doctor_findings import Finding, bad, good, warning
from edgesplit_agent.service.doctor_network import reach
from edgesplit_cli.settings import chosen_credentials

SOON_S = 14 * 86_400.0
PLACES = {"broker": "broker", "offload": "offload server"}
"""What devices are told the address of, and the part of the controller that it is."""
OF_DEVICES = frozenset({"gateway", "way to the cloud"})
"""Parts that are not the controller's own: it works without them."""


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
    api = ControllerClient.by(held)
    try:
        you = api.get("/v1/session")
        own = api.get("/v1/condition")
        parts = api.get("/v1/parts")
        keys = api.get("/v1/keys")
        fleet = api.get("/v1/fleet")
    except EdgeError as error:
        yield bad("access", str(error), "an admin makes new credentials: edgectl operator add; then edgectl login FILE")
        return
    yield good("access", f"{you['operator']} ({you['role']})")
    yield _version(own["version"])
    yield from _places(own["addresses"], {one["name"]: one for one in parts}, held, now)
    yield from (_part(one) for one in parts if one["name"] not in PLACES.values())
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


def _places(
    addresses: Mapping[str, str], parts: Mapping[str, Mapping[str, Any]], held: Credentials, now: float
) -> Iterator[Finding]:
    """Broker and offload server: as the controller sees them, and where it is content, as whoever stands here does."""
    for name, part in PLACES.items():
        seen, address = parts.get(part), addresses.get(name)
        if seen is not None and seen["state"] != "good":
            yield _part(seen)
        elif address:
            url = f"mqtts://{address}" if name == "broker" else address
            yield from reach(name, url, None, now, ca_pem=held.ca_pem, enters=False)


def _part(told: Mapping[str, Any]) -> Finding:
    """What the controller says of a part of itself, or of what devices depend on."""
    name = f"{told['name']} {told['subject']}".strip()
    if told["state"] == "good":
        return good(name, told["text"])
    found = warning if told["state"] == "unknown" or told["name"] in OF_DEVICES else bad
    return found(name, told["text"], told["do"])


def _keys(told: Mapping[str, Any]) -> Iterator[Finding]:
    """What is due; above all, that the root key still lies where everybody on that machine could take it."""
    notices = [str(one) for one in told["notices"]]
    for notice in notices:
        yield warning("keys", notice, "edgectl keys show; edgectl keys init --folder DIR moves the root key away")
    if not notices:
        yield good("keys", "nothing is due, and the root key is not on the controller")
