"""Runs a gateway's offload server beside the agent: its certificate, its revocation list and its process.

The agent fetches and verifies what the server runs; the server opens the same folder of releases and verifies again.
Its certificate is for a key of its own and for the gateway's name alone. The revocation list is fetched from the
controller every few seconds, over TLS, and accepted only with the authority's signature; while the controller cannot be
reached the last list stays in force. A server that ends is restarted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from time import monotonic, time
from typing import Protocol

import msgspec
from cryptography import x509

from edgesplit.atomic_files import write_durably
from edgesplit.client.connection import Connection
from edgesplit.errors import EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.identifiers import gateway_host
from edgesplit.limits import LIMITS
from edgesplit.links import parse_host_and_port
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.process.supervised import SupervisedProcess
from edgesplit.trust.identity import Credentials, certificate_request, load_or_make_key
from edgesplit.trust.revocation import AuthorityKey, RevocationList, authority_key, parse_revocation_list
from edgesplit_agent.control.certificate_renewal import due_in_s
from edgesplit_agent.control.enrolment import credentials, post
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.telemetry.conditions import flood_text

log = logging.getLogger(__name__)

STATUS_PATH = "/v2/edgesplit/status"
STATUS_TIMEOUT_S = 2.0
POLL_S = 3.0
"""Seconds between two requests for the revocation list."""
START_S = 60.0
"""Timeout of the server's start."""
STOP_S = 20.0
"""Timeout of waiting for this thread when the agent stops."""


@dataclass(frozen=True, slots=True)
class NextTier:
    """Address of the next tier."""

    url: str
    via: tuple[str, int] | None = None
    """Connect to this address instead (an emulated link in front of the next tier)."""


class ServerProcess(Protocol):
    """The part of a supervised process that is needed here."""

    def start(self, timeout_s: float, /) -> None: ...
    def stop(self) -> None: ...


class GatewayServer:
    """Keeps one offload server running for as long as the agent runs."""

    def __init__(
        self,
        folder: DataFolder,
        identity: Identity,
        listen: str,
        next_tier: NextTier,
        further_options: Sequence[str] = (),
        *,
        post: Callable[[str, bytes], bytes] | None = None,
        make_process: Callable[[], ServerProcess] | None = None,
        ask_status: Callable[[], bytes] | None = None,
        now: Callable[[], float] = time,
    ) -> None:
        """`listen`: HOST:PORT, or :PORT for every address of this machine. `further_options`: appended to the server's
        command line. `post` (what is requested, body) replaces the requests to the controller, `make_process` the
        offload server, `ask_status` the request for its status, `now` the wall clock."""
        self._post = post or self._post_by_https
        self._make_process = make_process or self._offload_server
        self._ask_status = ask_status or self._ask_status_by_https
        self._now = now
        self._further_options = tuple(further_options)
        self._folder = folder
        self._identity = identity
        self._listen = listen_address(listen)
        self._next_tier = next_tier
        self._server_folder = folder.path / "gateway"
        self._credentials = Credentials(
            self._server_folder / "key.pem", self._server_folder / "certificate.pem", folder.ca_file
        )
        self._revoked_file = self._server_folder / "revoked.pem"
        self._process: ServerProcess | None = None
        self._outdated = False
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self.trouble = "it has not started yet"
        """Why devices cannot offload here; empty while they can."""
        self.flood = ""
        """The device that the server refuses most, if again and again; empty for none."""
        self.list_problem = ""
        """Since when the revocation list has been expired; empty while it is valid."""

    def start(self) -> None:
        """Start the thread; the server listens once its certificate and revocation list are here."""
        self._thread.start()

    def on_renewed(self) -> None:
        """The agent's own certificate has changed: restart the server, which presents it to the next tier."""
        with self._changed:
            self._outdated = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the server; requests in flight get a few seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._stop_process()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.reconcile()
                self._set_trouble("")
            except (EdgeError, OSError) as error:
                self._set_trouble(str(error))
            except Exception as error:  # a programming error must not end the gateway for ever
                log.exception("the check of the gateway's server failed")
                self._set_trouble(str(error))
            with self._changed:
                if not self._stopping and not self._outdated:
                    self._changed.wait(POLL_S)

    def _set_trouble(self, trouble: str) -> None:
        """Set `trouble`, and log it where it is new."""
        if trouble and trouble != self.trouble:
            log.error("devices cannot offload here: %s", trouble)
        self.trouble = trouble

    def reconcile(self) -> None:
        """Bring certificate, revocation list and process up to date, each where it is missing or outdated."""
        fresh = self._renew_certificate()
        self._update_revocation_list()
        self._check_list_expiry()
        with self._changed:
            outdated, self._outdated = self._outdated, False
        if self._process is not None and (fresh or outdated):
            self._stop_process()
        if self._process is None:
            self._start_process(self._make_process())
        self.flood = self._read_flood()

    def _start_process(self, process: ServerProcess) -> None:
        with self._changed:
            if self._stopping:
                return
            self._process = process
        try:
            process.start(START_S)
        except UsageError:
            self._stop_process()
            raise
        log.info("devices can offload here, at %s port %d", *self._listen)

    def _stop_process(self) -> None:
        with self._changed:
            process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _renew_certificate(self) -> bool:
        """Renew the server's certificate where it is due; whether a new one was installed. A failed renewal is
        tolerated while the present certificate is valid."""
        if not self._is_certificate_due():
            return False
        key = load_or_make_key(self._credentials.key_file)
        csr_pem = certificate_request(key, self._identity.device).decode()
        try:
            response = self._post("certificate", json.dumps({"csr_pem": csr_pem}).encode())
        except EdgeError as error:
            if self._is_certificate_valid():
                log.warning("the server's certificate is not renewed yet: %s", error)
                return False
            raise
        write_durably(self._credentials.certificate_file, _parse_certificate(response))
        self._credentials.server_context()  # UsageError unless the certificate matches the key
        return True

    def _is_certificate_due(self) -> bool:
        certificate = self._certificate()
        if certificate is None:
            return True
        begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        return due_in_s(begins, ends, self._now()) <= 0

    def _is_certificate_valid(self) -> bool:
        certificate = self._certificate()
        return certificate is not None and certificate.not_valid_after_utc.timestamp() > self._now()

    def _certificate(self) -> x509.Certificate | None:
        """The installed certificate; None where there is none that fits the key."""
        try:
            certificate = x509.load_pem_x509_certificate(self._credentials.certificate_file.read_bytes())
            self._credentials.server_context()
        except (OSError, ValueError, EdgeError):
            return None
        return certificate

    def _update_revocation_list(self) -> None:
        """Fetch the revocation list, and store it where it lists something else than the present one, or that must be
        renewed. Without any list the error is raised: the server must not start without."""
        authority = authority_key(self._folder.ca_file)
        try:
            raw = self._post("crl", b"{}")
            fetched = parse_revocation_list(raw, authority)
        except EdgeError as error:
            if not self._revoked_file.exists():
                raise
            if not isinstance(error, LinkError):
                log.error("the previous revocation list stays in force: %s", error)
            return
        stored = self._stored_list(authority)
        if stored is None or fetched.serials != stored.serials or stored.is_due(self._now()):
            write_durably(self._revoked_file, raw)

    def _check_list_expiry(self) -> None:
        """Set `list_problem`. An expired list stays in force: without it every device here would lose its server."""
        stored = self._stored_list(authority_key(self._folder.ca_file))
        problem = ""
        if stored is not None and stored.expires <= self._now():
            since = datetime.fromtimestamp(stored.expires, timezone.utc).strftime("%Y-%m-%d")
            problem = f"its revocation list expired on {since}: the controller's API cannot be reached"
        if problem and problem != self.list_problem:
            log.error("%s", problem)
        self.list_problem = problem

    def _read_flood(self) -> str:
        """The device that the server refuses most, in words; empty for none, or while the server does not answer."""
        try:
            status = msgspec.json.decode(self._ask_status(), type=_ServerStatus)
        except (EdgeError, OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.debug("the status of the gateway's server: %s", error)
            return ""
        worst = max(status.refused_clients, key=lambda client: client.refused, default=None)
        return "" if worst is None else flood_text(worst.device, worst.refused, worst.reasons)

    def _ask_status_by_https(self) -> bytes:
        host, port = self._listen
        tls, name = credentials(self._folder).client_context(), gateway_host(self._identity.device)
        with closing(Connection("127.0.0.1" if host == "0.0.0.0" else host, port, tls, name)) as connection:
            return bytes(connection.exchange("GET", STATUS_PATH, deadline=monotonic() + STATUS_TIMEOUT_S).body)

    def _stored_list(self, authority: AuthorityKey) -> RevocationList | None:
        """The stored revocation list; None where there is none."""
        try:
            return parse_revocation_list(self._revoked_file.read_bytes(), authority)
        except (OSError, EdgeError):
            return None

    def _post_by_https(self, what: str, body: bytes) -> bytes:
        tls, url = credentials(self._folder).client_context(), self._identity.controller
        return post(url, f"/v1/gateway/{what}", tls, body, f"a gateway's {what}", max_bytes=LIMITS.metadata_bytes)

    def _offload_server(self) -> ServerProcess:
        """The server's process, not started yet."""
        root = self._server_folder / "root.json"
        write_durably(root, self._identity.tuf_root.encode())
        self._folder.releases.mkdir(parents=True, exist_ok=True)
        own = credentials(self._folder)
        host, port = self._listen
        options: dict[str, object] = {
            "--releases": self._folder.releases, "--root": root,
            "--cert": self._credentials.certificate_file, "--key": self._credentials.key_file,
            "--ca": self._credentials.ca_file, "--revoked": self._revoked_file,
            "--host": host, "--port": port, "--die-with-parent": os.getpid(),
            "--next-tier": self._next_tier.url, "--next-tier-cert": own.certificate_file,
            "--next-tier-key": own.key_file,
        }  # fmt: skip
        if self._next_tier.via is not None:
            options["--next-tier-via"] = f"{self._next_tier.via[0]}:{self._next_tier.via[1]}"
        return SupervisedProcess(
            "offload server",
            [*_COMMAND, *(str(part) for option in options.items() for part in option), *self._further_options],
            ready_line="listening on",
            log_file=self._server_folder / "offload.log",
            pid_file=self._server_folder / "pid",
        )


_COMMAND: Sequence[str] = (sys.executable, "-m", "edgesplit_offload.main")


def listen_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, or of :PORT for every address; otherwise UsageError."""
    return parse_host_and_port(f"0.0.0.0{text}" if text.startswith(":") else text, "gateway's server")


class _RefusedClient(msgspec.Struct):
    device: str
    refused: int
    reasons: str


class _ServerStatus(msgspec.Struct):
    refused_clients: list[_RefusedClient]


class _CertificateResponse(msgspec.Struct):
    certificate_pem: str


def _parse_certificate(answer: bytes) -> bytes:
    try:
        return msgspec.json.decode(answer, type=_CertificateResponse).certificate_pem.encode()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"a gateway's certificate: {error}") from error


warm_up_structs(__name__)
