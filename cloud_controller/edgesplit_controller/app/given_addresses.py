"""The addresses that enrolled devices hold, and whether a start with other settings would strand them.

A device stores the addresses of controller, broker and offload server when it enrols, and looks nowhere else. They are
kept in `addresses.json` in the data folder with the time since which they were given out, so that the time of its
enrolment says which ones a device holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit_controller.app.assembly import api_url, offload_url
from edgesplit_controller.settings import Settings, url_host

FILE: Final = "addresses.json"
EVERY_ADDRESS: Final = ("0.0.0.0", "::")
MOST_NAMED = 10
"""Devices that a message names."""
MOST_ENTRIES = 500
"""Changes of address that are remembered."""


class GivenAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses that devices were given from a time on."""

    since: float
    """Unix time of the start from which they were given."""
    api: str
    """URL of the API."""
    broker: str
    """HOST:PORT of the broker."""
    offload: str
    """URL of the offload server."""
    bind: str
    """Address on which the controller listened."""


@dataclass(frozen=True, slots=True)
class Stranded:
    """Devices that a start would strand."""

    held: GivenAddresses
    """What they hold."""
    devices: tuple[str, ...]
    changes: tuple[str, ...]
    """What of it would no longer answer, for people."""


def addresses_of(settings: Settings, now: float) -> GivenAddresses:
    """The addresses that devices get from a controller with these settings."""
    host, port = settings.device_broker
    return GivenAddresses(
        since=now, api=api_url(settings), broker=f"{url_host(host)}:{port}", offload=offload_url(settings),
        bind=settings.address,
    )  # fmt: skip


def lost_addresses(held: GivenAddresses, settings: Settings) -> tuple[str, ...]:
    """Which of the addresses that a device holds would not answer under these settings, for people."""
    new = addresses_of(settings, 0.0)
    own_broker = 0 if settings.broker else settings.mqtt_port
    own_offload = settings.offload_port if settings.offload else 0
    lost = [
        f"{what} {old} would be {now}"
        for what, old, now, own_port in (
            ("the controller", held.api, new.api, settings.api_port),
            ("the broker", f"mqtts://{held.broker}", f"mqtts://{new.broker}", own_broker),
            ("the offload server", held.offload, new.offload, own_offload),
        )
        if old != now and not _answers(old, own_port, settings.certificate_hosts)
    ]
    if not lost and new.bind not in (held.bind, *EVERY_ADDRESS):
        lost.append(f"it would listen on {new.bind} only, where it listened on {held.bind}")
    return tuple(lost)


def _answers(url: str, own_port: int, own_hosts: Sequence[str]) -> bool:
    """Whether a server of this controller on `own_port` (0: none) still answers at the URL, by its certificate."""
    parts = urlsplit(url)
    return bool(own_port) and parts.port == own_port and parts.hostname in {host.lower() for host in own_hosts}


def find_stranded(
    history: Sequence[GivenAddresses], enrolled: Mapping[str, float], settings: Settings
) -> list[Stranded]:
    """The enrolled devices (name and Unix time of enrolment) that could not reach a controller with these settings, by
    the addresses that they hold. Devices from before the first entry are taken to hold that one."""
    if not history:
        return []
    by_held: dict[int, list[str]] = {}
    for name, at in sorted(enrolled.items()):
        index = max((index for index, entry in enumerate(history) if entry.since <= at), default=0)
        by_held.setdefault(index, []).append(name)
    return [
        Stranded(history[index], tuple(names), lost)
        for index, names in sorted(by_held.items())
        if (lost := lost_addresses(history[index], settings))
    ]


def check_reachable(history: Sequence[GivenAddresses], enrolled: Mapping[str, float], settings: Settings) -> None:
    """UsageError if a start with these settings would strand devices, unless `settings.force`."""
    stranded = find_stranded(history, enrolled, settings)
    if stranded and not settings.force:
        raise UsageError(stranding_message(stranded))


def stranding_message(stranded: Sequence[Stranded]) -> str:
    """What would be lost, for which devices, and what to do."""
    lines = []
    for group in stranded:
        names = ", ".join(group.devices[:MOST_NAMED])
        more = f" and {len(group.devices) - MOST_NAMED} more" if len(group.devices) > MOST_NAMED else ""
        lines.append(f"  {names}{more}: {'; '.join(group.changes)}")
    return (
        "not started: enrolled devices would not find this controller any more, because they look only where their"
        " credentials say:\n" + "\n".join(lines) + "\n"
        f"Start it where they look (`edgectl up {_options(stranded[0].held)}`; `edgectl config` shows what is kept), or"
        " add --force and enrol them again (`edgectl device claim NAME --replace ...`)."
    )


def _options(held: GivenAddresses) -> str:
    api, broker, offload = urlsplit(held.api), urlsplit(f"mqtts://{held.broker}"), urlsplit(held.offload)
    host = "" if api.hostname in (None, "127.0.0.1") else f"--host {api.hostname} "
    bind = "" if held.bind in ("127.0.0.1", *EVERY_ADDRESS) else f"--bind {held.bind} "
    ports = f"--api-port {api.port} --mqtt-port {broker.port} --offload-port {offload.port}"
    return f"{host}{bind}{ports}"


def read_history(data: Path) -> list[GivenAddresses]:
    """The addresses given out so far, oldest first; UsageError if the file is damaged."""
    try:
        return msgspec.json.decode((data / FILE).read_bytes(), type=list[GivenAddresses])
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise UsageError(f"{data / FILE} is damaged ({error}): restore it from a backup, or remove it") from error


def remember(data: Path, history: Sequence[GivenAddresses], given: GivenAddresses) -> None:
    """Store the addresses that are given out from now on, if they are new."""
    if history and msgspec.structs.replace(history[-1], since=given.since) == given:
        return
    kept = [*history, given][-MOST_ENTRIES:]
    write_durably(data / FILE, msgspec.json.format(msgspec.json.encode(kept), indent=1))
