"""A gateway's offload server beside the agent: its certificate, the revocation list it goes by, and its process.

The agent fetches and verifies what the server runs; the server opens the same folder of releases and verifies again.
Its certificate is for a key of its own and for the gateway's name alone. The list of who is revoked is asked of the
controller every few seconds, over TLS, and believed only with the authority's signature; while the controller cannot be
reached the last one stays in force. A server that ends is started again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import time

import msgspec
from cryptography import x509

from edgesplit.atomic_files import write_durably
from edgesplit.errors import EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.links import host_and_port
from edgesplit.msgspec_warmup import settle
from edgesplit.process.supervised import Child
from edgesplit.trust.identity import Credentials, certificate_request, load_or_make_key
from edgesplit.trust.revocation import AuthorityKey, authority_key, revoked_in
from edgesplit_agent.control.certificate_renewal import due_in_s
from edgesplit_agent.control.enrolment import credentials, post
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Between two looks for a newer revocation list."""
START_S = 60.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Onward:
    """The next tier."""

    url: str
    via: tuple[str, int] | None = None
    """Connect there instead (an emulated link in front of it)."""


class GatewayServer:
    """Tends one offload server for as long as the agent runs."""

    def __init__(
        self, folder: DataFolder, identity: Identity, listen: str, onward: Onward, more: Sequence[str] = ()
    ) -> None:
        """`listen`: HOST:PORT, or :PORT for every address of this machine. `more`: for the server's command line."""
        self._more = tuple(more)
        self._folder = folder
        self._identity = identity
        self._listen = listen_address(listen)
        self._onward = onward
        self._home = folder.path / "gateway"
        self._credentials = Credentials(self._home / "key.pem", self._home / "certificate.pem", folder.ca_file)
        self._revoked_file = self._home / "revoked.pem"
        self._child: Child | None = None
        self._outdated = False
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self.trouble = "it has not started yet"
        """Why devices cannot offload here; empty while they can."""

    def start(self) -> None:
        """Begin; the server listens as soon as it may."""
        self._thread.start()

    def renewed(self) -> None:
        """The agent's own certificate has changed: the server shows the new one to the next tier."""
        with self._changed:
            self._outdated = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the server; requests that run get a few seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._end_child()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._tend()
                self._note("")
            except (EdgeError, OSError) as error:
                self._note(str(error))
            except Exception as error:  # a fault of ours must not end the gateway for ever
                log.exception("the gateway's server cannot be tended")
                self._note(str(error))
            with self._changed:
                if not self._stopping and not self._outdated:
                    self._changed.wait(LOOK_S)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.error("devices cannot offload here: %s", trouble)
        self.trouble = trouble

    def _tend(self) -> None:
        """Certificate, list, process: what is missing or old is made good."""
        fresh = self._keep_certificate()
        self._keep_list()
        with self._changed:
            outdated, self._outdated = self._outdated, False
        if self._child is not None and (fresh or outdated):
            self._end_child()
        if self._child is None:
            self._begin_child(self._made_child())

    def _begin_child(self, child: Child) -> None:
        with self._changed:
            if self._stopping:
                return
            self._child = child
        try:
            child.start(START_S)
        except UsageError:
            self._end_child()
            raise
        log.info("devices can offload here, at %s port %d", *self._listen)

    def _end_child(self) -> None:
        with self._changed:
            child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _keep_certificate(self) -> bool:
        """Have a certificate for the server's key that does not end soon; was one got now?"""
        if not self._due():
            return False
        key = load_or_make_key(self._credentials.key_file)
        csr_pem = certificate_request(key, self._identity.device).decode()
        try:
            answer = self._ask("certificate", json.dumps({"csr_pem": csr_pem}).encode())
        except EdgeError as error:
            if self._usable():
                log.warning("the server's certificate is not renewed yet: %s", error)
                return False
            raise
        write_durably(self._credentials.certificate_file, _certificate_of(answer))
        self._credentials.server_context()  # it fits our key, or UsageError
        return True

    def _due(self) -> bool:
        held = self._certificate()
        if held is None:
            return True
        begins, ends = held.not_valid_before_utc.timestamp(), held.not_valid_after_utc.timestamp()
        return due_in_s(begins, ends, time()) <= 0

    def _usable(self) -> bool:
        held = self._certificate()
        return held is not None and held.not_valid_after_utc.timestamp() > time()

    def _certificate(self) -> x509.Certificate | None:
        try:
            held = x509.load_pem_x509_certificate(self._credentials.certificate_file.read_bytes())
            self._credentials.server_context()
        except (OSError, ValueError, EdgeError):
            return None
        return held

    def _keep_list(self) -> None:
        """Take over a revocation list that says something else than the one we have. The first must come."""
        authority = authority_key(self._folder.ca_file)
        try:
            raw = self._ask("revoked", b"{}")
            serials = revoked_in(raw, authority)
        except EdgeError as error:
            if not self._revoked_file.exists():
                raise
            if not isinstance(error, LinkError):
                log.error("the revocation list of before stays in force: %s", error)
            return
        if serials != self._known(authority):
            write_durably(self._revoked_file, raw)

    def _known(self, authority: AuthorityKey) -> frozenset[int] | None:
        try:
            return revoked_in(self._revoked_file.read_bytes(), authority)
        except (OSError, EdgeError):
            return None

    def _ask(self, what: str, body: bytes) -> bytes:
        tls, url = credentials(self._folder).client_context(), self._identity.controller
        return post(url, f"/v1/gateway/{what}", tls, body, f"a gateway's {what}", most=LIMITS.metadata_bytes)

    def _made_child(self) -> Child:
        root = self._home / "root.json"
        write_durably(root, self._identity.tuf_root.encode())
        self._folder.releases.mkdir(parents=True, exist_ok=True)
        own = credentials(self._folder)
        host, port = self._listen
        words: dict[str, object] = {
            "--releases": self._folder.releases, "--root": root,
            "--cert": self._credentials.certificate_file, "--key": self._credentials.key_file,
            "--ca": self._credentials.ca_file, "--revoked": self._revoked_file,
            "--host": host, "--port": port, "--die-with-parent": os.getpid(),
            "--onward": self._onward.url, "--onward-cert": own.certificate_file, "--onward-key": own.key_file,
        }  # fmt: skip
        if self._onward.via is not None:
            words["--onward-via"] = f"{self._onward.via[0]}:{self._onward.via[1]}"
        return Child(
            "offload server",
            [*_COMMAND, *(str(word) for pair in words.items() for word in pair), *self._more],
            announces="listening on",
            log_file=self._home / "offload.log",
            pid_file=self._home / "pid",
        )


_COMMAND: Sequence[str] = (sys.executable, "-m", "edgesplit_offload.main")


def listen_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or :PORT for every address; else UsageError."""
    return host_and_port(f"0.0.0.0{text}" if text.startswith(":") else text, "gateway's server")


class _Given(msgspec.Struct):
    certificate_pem: str


def _certificate_of(answer: bytes) -> bytes:
    try:
        return msgspec.json.decode(answer, type=_Given).certificate_pem.encode()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"a gateway's certificate: {error}") from error


settle(__name__)
