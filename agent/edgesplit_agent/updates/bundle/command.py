"""`edgesplit-agent bundle`: show what a release bundle contains, and apply it.

Where an agent runs on the data folder, it receives a request and its progress is shown. Where none runs, this process
applies the bundle itself, and the agent serves the releases at its next start. Either way the folder's files remain its
owner's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from edgesplit.errors import EdgeError, LinkError, UsageError
from edgesplit.quantities import parse_size
from edgesplit.release.bundle_format import BundleIndex
from edgesplit.trust.store import TrustStore
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.content_keys import ContentKeys
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.state.activation_store import ActivationStore
from edgesplit_agent.state.data_folder import DataFolder, FolderInUse, Identity
from edgesplit_agent.updates.assignment import Assignment
from edgesplit_agent.updates.bundle import request
from edgesplit_agent.updates.bundle.fetcher import BundleFetcher
from edgesplit_agent.updates.bundle.importer import BundleImporter, OnProgress
from edgesplit_agent.updates.bundle.reader import open_bundle
from edgesplit_agent.updates.download_window import DownloadWindow
from edgesplit_agent.updates.release_installer import ReleaseInstaller
from edgesplit_agent.updates.trusted_manifests import TrustedManifests

WAIT_S = 3_600
"""Default seconds to wait for a running agent."""
POLL_S = 0.5
"""Seconds between two looks at the running agent's status."""
ReadStatus = Callable[[DataFolder], dict[str, Any]]
"""Status of the agent that runs on that folder; LinkError where it does not answer."""


def add_bundle_command(commands: Any, status: ReadStatus) -> None:
    """Add the command `bundle` to the parser; `status` reads the status of a running agent."""
    bundle = commands.add_parser("bundle", help="releases from a USB stick or a file, without a network")
    subcommands = bundle.add_subparsers(required=True, metavar="COMMAND")
    show = subcommands.add_parser("show", help="show what a bundle contains, and whether this device trusts it")
    show.add_argument("bundle", type=Path, metavar="DIR|FILE.tar")
    show.add_argument(
        "--data", type=Path, metavar="DIR", help="the agent's data folder, by whose trust the bundle is verified"
    )
    show.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    show.set_defaults(command=_show)
    apply = subcommands.add_parser("apply", help="apply a bundle to this device")
    apply.add_argument("bundle", type=Path, metavar="DIR|FILE.tar")
    apply.add_argument("--data", type=Path, required=True, metavar="DIR", help="the agent's data folder")
    apply.add_argument(
        "--wait",
        type=int,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"time for a running agent to apply it (default {WAIT_S})",
    )
    apply.add_argument(
        "--store-quota", type=_size, metavar="SIZE", help="where no agent runs: like the agent's option of that name"
    )
    apply.set_defaults(command=lambda options: _apply(options, status))


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _show(options: argparse.Namespace) -> int:
    carrier = BundleFetcher(open_bundle(options.bundle))
    try:
        index = carrier.index()
        description = _to_dict(index)
        if options.data is not None:
            description["device"], description["verified"] = verify_for_device(carrier, DataFolder(options.data))
    finally:
        carrier.close()
    if options.as_json:
        print(json.dumps(description, indent=2))
        return 0
    for line in lines(description):
        print(line)
    return 0


def _to_dict(index: BundleIndex) -> dict[str, Any]:
    return {
        "created": index.created, "valid_until": index.valid_until, "limited_by": index.limited_by,
        "controller": index.controller, "devices": dict(index.devices), "kit": index.kit,
        "releases": [{"model": item.model, "release": item.release, "bytes": item.bytes} for item in index.releases],
    }  # fmt: skip


def verify_for_device(
    carrier: BundleFetcher, folder: DataFolder, now: Callable[[], float] = time.time
) -> tuple[str, str]:
    """The device of that folder, and the result of verifying the bundle's signatures against its trust now, for people;
    nothing in the folder changes.

    Whether the device has accepted something newer already shows only when the bundle is applied.
    """
    identity = _identity(folder)
    with tempfile.TemporaryDirectory(prefix="es-") as scratch:
        store = TrustStore(Path(scratch), identity.tuf_root.encode(), now=now)
        try:
            store.refresh(carrier.fetch)
            statement = store.verify_statement(carrier.statement(identity.device), identity.device, for_install=True)
        except EdgeError as error:
            return identity.device, f"not applicable: {error}"
    return identity.device, f"valid; statement {statement.counter}, {len(statement.releases)} models"


def lines(description: Mapping[str, Any]) -> list[str]:
    """The description of a bundle as lines for a terminal; characters that are not printable are replaced, because the
    bundle is not trusted."""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(max(description["valid_until"], 0), 2**40)))
    result = [
        f"created by {_plain(description['controller'])}, valid until {until} ({_plain(description['limited_by'])})"
    ]
    result += [
        f"  {_plain(entry['model'])}  {entry['release'][:12]}  {entry['bytes'] / 1e6:.1f} MB"
        for entry in description["releases"]
    ]
    devices = [f"{_plain(name)} ({_plain(kind)})" for name, kind in description["devices"].items()]
    result.append(f"  for {', '.join(devices)}")
    if description["kit"]:
        result.append(f"  kit for {_plain(description['kit'])}: run edgesplit/install.sh as root")
    if "verified" in description:
        result.append(f"on this device, {description['device']}: {_plain(description['verified'])}")
    else:
        result.append("not verified: --data verifies it by this device's trust")
    return result


def _apply(options: argparse.Namespace, status: ReadStatus) -> int:
    become_owner(options.data)
    bundle = options.bundle.absolute()
    folder = DataFolder(options.data)
    identity = _identity(folder)
    try:
        folder.acquire()
    except FolderInUse:
        return _request_and_wait(folder, bundle, options.wait, status)
    try:
        lacking = apply_without_agent(folder, identity, bundle, _progress_bar(), options.store_quota)
    finally:
        folder.release()
    lacking = lacking or "all releases of this device are stored"
    print(f"applied: {lacking}; the agent serves them from its next start")
    return 0


def apply_without_agent(
    folder: DataFolder,
    identity: Identity,
    bundle: Path,
    on_progress: OnProgress = lambda done, of: None,
    quota_bytes: int | None = None,
    *,
    now: Callable[[], float] = time.time,
) -> str:
    """Apply a bundle to a folder that this process holds and on which no agent runs; what the bundle lacks, for
    people. No start is counted, and nothing is loaded. `now` is the wall clock, in Unix seconds."""
    activation, versions = ActivationStore(folder), VersionManager(folder)
    manifests = TrustedManifests(folder, identity, now=now)
    assignment = Assignment(manifests, activation, versions, ContentKeys(folder, identity), identity.device_class)
    store = ChunkStore(folder.chunks, folder.releases, quota_bytes)
    installer = ReleaseInstaller(
        folder, store, manifests, assignment, activation, versions, DownloadWindow(), _no_uplink
    )
    activation.current = installer.stored_state()
    importer = BundleImporter(identity.device, assignment, installer, on_progress)
    return importer.apply(bundle, lambda statement: None, lambda: False)


def _no_uplink() -> Uplink:
    raise LinkError("no agent runs here")


def _request_and_wait(folder: DataFolder, bundle: Path, wait_s: float, status: ReadStatus) -> int:
    submitted = request.submit(folder.bundle_request_file, bundle)
    until, pause, last_detail, bar = monotonic() + wait_s, threading.Event(), "", _progress_bar()
    while monotonic() < until:
        try:
            info = status(folder).get("release_bundle") or {}
        except LinkError:
            info = {}
        if info.get("number") == submitted.number:
            if info["state"] == "taken":
                detail = f": {info['detail']}" if info["detail"] else ""
                print(f"applied{detail}; `edgesplit-agent status` shows what runs")
                return 0
            if info["state"] == "refused":
                request.withdraw(folder.bundle_request_file, submitted.number)
                raise UsageError(f"the agent refused the bundle: {info['detail']}")
            if info["state"] == "waiting" and info["detail"] != last_detail:
                last_detail = info["detail"]
                print(f"waiting: {last_detail}", file=sys.stderr)
            bar(info.get("bytes", 0), info.get("of", 0))
        elif request.read(folder.bundle_request_file) is None:
            request.write(folder.bundle_request_file, submitted)
        pause.wait(POLL_S)
    raise LinkError(
        f"the agent has not applied it within {wait_s:.0f} s; it continues by itself, `status` shows its progress"
    )


def _identity(folder: DataFolder) -> Identity:
    """The identity of the folder's device; UsageError where it is not enrolled."""
    identity = folder.read_identity()
    if identity is None:
        raise UsageError(f"{folder.path} is not enrolled: a bundle contains releases, and no identity")
    return identity


def become_owner(data: Path) -> None:
    """As root, switch permanently to the folder's owner: files written by root would block the agent."""
    try:
        owner = data.stat()
    except OSError as error:
        raise UsageError(f"no agent's folder at {data}: {error.strerror}") from error
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.setgroups([owner.st_gid])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)


def _progress_bar() -> Callable[[int, int], None]:
    """A callback that shows progress on stderr where it is a terminal, otherwise does nothing."""
    if not sys.stderr.isatty():
        return lambda done, of: None

    def show_progress(done: int, total: int) -> None:
        if total:
            sys.stderr.write(f"\r{done / 1e6:8.1f} of {total / 1e6:.1f} MB{chr(10) if done == total else ''}")
            sys.stderr.flush()

    return show_progress


def _plain(text: object) -> str:
    """`text` with unprintable characters replaced, at most 200 characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))[:200]
