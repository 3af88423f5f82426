"""The checks of `edgectl doctor`: the controller as seen from an operator's machine, each with a remedy."""

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
from edgesplit.observability.doctor_findings import Finding, bad, good, warning
from edgesplit_agent.service.doctor_network import check_server
from edgesplit_cli.settings import chosen_credentials

SOON_S = 14 * 86_400.0
"""Credentials that expire within this time give a warning."""
ADDRESSED_PARTS = {"broker": "broker", "offload": "offload server"}
"""Components whose addresses devices are given, and their names among the controller's parts."""
DEVICE_SIDE_PARTS = frozenset({"gateway", "way to the cloud"})
"""Parts that are not the controller's own; it works without them."""


def examine(data: Path, now: float | None = None) -> Iterator[Finding]:
    """All findings. Where the controller is not reachable or refuses access, checks that need it are left out."""
    now = time.time() if now is None else now
    try:
        file = chosen_credentials(data)
        login = credentials.read(file) if file else credentials.from_data_folder(data)
    except EdgeError as error:
        yield bad("credentials", str(error), "edgectl up on this machine, or edgectl login FILE for one elsewhere")
        return
    yield _credentials(login, file or data, now)
    path_findings = list(check_server("controller", login.url, None, now, ca_pem=login.ca_pem))
    yield from path_findings
    if any(item.level == "bad" for item in path_findings):
        return
    api = ControllerClient.from_credentials(login)
    try:
        session = api.get("/v1/session")
        status = api.get("/v1/status")
        parts = api.get("/v1/components")
        keys = api.get("/v1/keys")
        fleet = api.get("/v1/fleet")
    except EdgeError as error:
        yield bad("access", str(error), "an admin makes new credentials: edgectl operator add; then edgectl login FILE")
        return
    yield good("access", f"{session['operator']} ({session['role']})")
    yield _version(status["version"])
    yield from _addressed_parts(status["addresses"], {item["name"]: item for item in parts}, login, now)
    yield from (_part(item) for item in parts if item["name"] not in ADDRESSED_PARTS.values())
    yield from _keys(keys)
    counted = ", ".join(f"{number} {state}" for state, number in fleet["devices"].items() if number) or "none yet"
    yield good("devices", counted)


def _credentials(login: Credentials, file: Path, now: float) -> Finding:
    if login.expires is not None and login.expires < now + SOON_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(login.expires))
        return warning("credentials", f"{file}: until {day}", "an admin makes new ones: edgectl operator add")
    return good("credentials", f"{login.operator} at {login.url}, from {file}")


def _version(theirs: str) -> Finding:
    if theirs != edgesplit.__version__:
        todo = "install the same version here and there: pip install edgesplit[cli]==..."
        return warning("version", f"the controller is {theirs}, this edgectl {edgesplit.__version__}", todo)
    return good("version", theirs)


def _addressed_parts(
    addresses: Mapping[str, str], parts: Mapping[str, Mapping[str, Any]], login: Credentials, now: float
) -> Iterator[Finding]:
    """Broker and offload server: the controller's own finding, and where that is good, whether they are reachable from
    here."""
    for name, part in ADDRESSED_PARTS.items():
        state, address = parts.get(part), addresses.get(name)
        if state is not None and state["state"] != "good":
            yield _part(state)
        elif address:
            url = f"mqtts://{address}" if name == "broker" else address
            yield from check_server(name, url, None, now, ca_pem=login.ca_pem, must_accept=False)


def _part(part: Mapping[str, Any]) -> Finding:
    """The controller's finding about one of its parts, or one that devices depend on."""
    name = f"{part['name']} {part['subject']}".strip()
    if part["state"] == "good":
        return good(name, part["text"])
    finding = warning if part["state"] == "unknown" or part["name"] in DEVICE_SIDE_PARTS else bad
    return finding(name, part["text"], part["remedy"])


def _keys(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Notices about keys that are due; above all, that the root key is still on the controller, where anyone with
    access to that machine could take it."""
    notices = [str(notice_text) for notice_text in status["notices"]]
    for notice in notices:
        yield warning("keys", notice, "edgectl keys show; edgectl keys init --folder DIR moves the root key away")
    if not notices:
        yield good("keys", "nothing is due, and the root key is not on the controller")
