"""`edgesplit-agent bundle`: show what a bundle holds, and take it.

Where an agent runs on the folder it is asked and followed; where none does the bundle is taken here and now, and the
agent runs what came at its next start. Either way the folder's files stay its owner's.
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
from edgesplit.release.bundle_format import Index
from edgesplit.trust.store import TrustStore
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.state.data_folder import DataFolder, FolderHeld, Identity
from edgesplit_agent.updates.bundle import request
from edgesplit_agent.updates.bundle.fetcher import Carrier
from edgesplit_agent.updates.bundle.reader import open_bundle

WAIT_S = 3_600
LOOK_S = 0.5
Status = Callable[[DataFolder], dict[str, Any]]
"""What the agent on that folder says of itself; LinkError where it does not answer."""


def add(commands: Any, status: Status) -> None:
    """The command, beside the others; `status` asks an agent that runs."""
    bundle = commands.add_parser("bundle", help="releases from a USB stick or a file, without a network")
    every = bundle.add_subparsers(required=True, metavar="COMMAND")
    show = every.add_parser("show", help="what a bundle holds, and whether this device believes it")
    show.add_argument("bundle", type=Path, metavar="DIR|FILE.tar")
    show.add_argument("--data", type=Path, metavar="DIR", help="the agent's own folder: verify by what it trusts")
    show.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    show.set_defaults(command=_show)
    apply = every.add_parser("apply", help="take what this device shall run from a bundle")
    apply.add_argument("bundle", type=Path, metavar="DIR|FILE.tar")
    apply.add_argument("--data", type=Path, required=True, metavar="DIR", help="the agent's own folder")
    apply.add_argument(
        "--wait", type=int, default=WAIT_S, metavar="SECONDS", help=f"for an agent that runs (default {WAIT_S})"
    )
    apply.add_argument(
        "--store-quota", type=_size, metavar="SIZE", help="where no agent runs: as its own option of that name"
    )
    apply.set_defaults(command=lambda options: _apply(options, status))


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _show(options: argparse.Namespace) -> int:
    carrier = Carrier(open_bundle(options.bundle))
    try:
        index = carrier.index()
        told = _told(index)
        if options.data is not None:
            told["device"], told["verified"] = verified(carrier, DataFolder(options.data))
    finally:
        carrier.close()
    if options.as_json:
        print(json.dumps(told, indent=2))
        return 0
    for line in lines(told):
        print(line)
    return 0


def _told(index: Index) -> dict[str, Any]:
    return {
        "made": index.made, "valid_until": index.valid_until, "limited_by": index.limited_by,
        "controller": index.controller, "devices": dict(index.devices), "kit": index.kit,
        "releases": [{"model": one.model, "release": one.release, "bytes": one.bytes} for one in index.releases],
    }  # fmt: skip


def verified(carrier: Carrier, folder: DataFolder, now: Callable[[], float] = time.time) -> tuple[str, str]:
    """The device of that folder, and what it makes of the bundle's signatures today; nothing in the folder changes.

    Whether it knows something newer already, only taking it tells.
    """
    identity = _identity(folder)
    with tempfile.TemporaryDirectory(prefix="es-") as scratch:
        store = TrustStore(Path(scratch), identity.tuf_root.encode(), now=now)
        try:
            store.refresh(carrier.fetch)
            said = store.statement(carrier.statement(identity.device), identity.device, install=True)
        except EdgeError as error:
            return identity.device, f"not to be taken: {error}"
    return identity.device, f"good; statement {said.counter}, {len(said.releases)} models"


def lines(told: Mapping[str, Any]) -> list[str]:
    """A bundle, for people; its own words with nothing in them that a terminal would obey."""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(max(told["valid_until"], 0), 2**40)))
    found = [f"made by {_plain(told['controller'])}, good until {until} ({_plain(told['limited_by'])})"]
    found += [
        f"  {_plain(one['model'])}  {one['release'][:12]}  {one['bytes'] / 1e6:.1f} MB" for one in told["releases"]
    ]
    found.append("  for " + ", ".join(f"{_plain(name)} ({_plain(kind)})" for name, kind in told["devices"].items()))
    if told["kit"]:
        found.append(f"  kit for {_plain(told['kit'])}: run edgesplit/install.sh as root")
    if "verified" in told:
        found.append(f"on this device, {told['device']}: {_plain(told['verified'])}")
    else:
        found.append("not verified: give --data for what this device makes of it")
    return found


def _apply(options: argparse.Namespace, status: Status) -> int:
    become_owner(options.data)
    bundle = options.bundle.absolute()
    folder = DataFolder(options.data)
    identity = _identity(folder)
    try:
        folder.hold()
    except FolderHeld:
        return _ask(folder, bundle, options.wait, status)
    try:
        said = take_here(folder, identity, bundle, _bar(), options.store_quota)
    finally:
        folder.release()
    print(f"taken: {said or 'everything that this device shall run is here'}; it runs with the next start of the agent")
    return 0


def take_here(
    folder: DataFolder,
    identity: Identity,
    bundle: Path,
    told: Callable[[int, int], None] = lambda done, of: None,
    quota_bytes: int | None = None,
) -> str:
    """Take a bundle into a folder that is held and on which no agent runs."""
    work = at_rest(folder, identity, quota_bytes)
    work.told_of_bundle = told
    return str(work.take_bundle(str(bundle), lambda statement: None, lambda: False))


def at_rest(folder: DataFolder, identity: Identity, quota_bytes: int | None = None) -> Any:
    """The agent's own hands, with nothing loaded and nothing served."""
    from edgesplit_agent.updates.actions import Work

    work = Work(folder, identity, _Idle(), ChunkStore(folder.chunks, folder.releases, quota_bytes), _nothing_starts)
    work.rest()
    return work


class _Idle:
    """An engine that serves nothing."""

    serving: Mapping[str, Any] = {}

    def serve(self, model: str, release: Any) -> None:
        raise AssertionError("nothing is served here")

    def drop(self, model: str) -> None:
        raise AssertionError("nothing is served here")


def _nothing_starts(*_: Any) -> Any:
    raise AssertionError("nothing is loaded here")


def _ask(folder: DataFolder, bundle: Path, wait_s: float, status: Status) -> int:
    asked = request.ask(folder.bundle_wish, bundle)
    until, pause, seen, bar = monotonic() + wait_s, threading.Event(), "", _bar()
    while monotonic() < until:
        try:
            now = status(folder).get("bundle") or {}
        except LinkError:
            now = {}
        if now.get("number") == asked.number:
            if now["state"] == "taken":
                print(f"taken{': ' + now['detail'] if now['detail'] else ''}; `edgesplit-agent status` shows what runs")
                return 0
            if now["state"] == "refused":
                request.withdraw(folder.bundle_wish, asked.number)
                raise UsageError(f"the agent does not take it: {now['detail']}")
            if now["state"] == "waiting" and now["detail"] != seen:
                seen = now["detail"]
                print(f"waiting: {seen}", file=sys.stderr)
            bar(now.get("bytes", 0), now.get("of", 0))
        elif request.read(folder.bundle_wish) is None:
            request.put(folder.bundle_wish, asked)
        pause.wait(LOOK_S)
    raise LinkError(f"the agent has not taken it within {wait_s:.0f} s; it goes on by itself, `status` shows how far")


def _identity(folder: DataFolder) -> Identity:
    identity = folder.enrolled()
    if identity is None:
        raise UsageError(f"{folder.path} is not enrolled: a bundle brings releases, not who the device is")
    return identity


def become_owner(data: Path) -> None:
    """Root takes the folder's owner's place for good: what it wrote would be in the agent's way."""
    try:
        owner = data.stat()
    except OSError as error:
        raise UsageError(f"no agent's folder at {data}: {error.strerror}") from error
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.setgroups([owner.st_gid])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)


def _bar() -> Callable[[int, int], None]:
    """A line that says how far it is, where somebody looks."""
    if not sys.stderr.isatty():
        return lambda done, of: None

    def told(done: int, of: int) -> None:
        if of:
            sys.stderr.write(f"\r{done / 1e6:8.1f} of {of / 1e6:.1f} MB{chr(10) if done == of else ''}")
            sys.stderr.flush()

    return told


def _plain(text: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))[:200]
