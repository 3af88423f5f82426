"""Certificates of one controller process for its own servers and clients: issued at its start, and renewed while it
runs, however long that is.

The files are replaced in place, with the same key. TLS contexts of `edgesplit.trust.renewed_context` follow them; who
reads a certificate in another way is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from edgesplit.trust.identity import Credentials
from edgesplit.trust.renewed_context import RenewedContext
from edgesplit_controller.pki.authority import Authority

log = logging.getLogger(__name__)

OnRenewed = Callable[[], None]


@dataclass(slots=True)
class _Entry:
    issue: Callable[[], Credentials]
    certificate: bytes
    """In use."""
    on_renewed: OnRenewed


class OwnCertificates:
    """The certificates that one process uses."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._entries: list[_Entry] = []

    def server(
        self, name: str, hosts: Sequence[str], *, for_browsers: bool = False, on_renewed: OnRenewed = lambda: None
    ) -> Credentials:
        """Credentials of a server, as of `Authority.issue_server`; `on_renewed` is called after each renewal."""
        return self._add(partial(self._authority.issue_server, name, hosts, for_browsers=for_browsers), on_renewed)

    def client(self, name: str, on_renewed: OnRenewed = lambda: None) -> Credentials:
        """Credentials of a client, as of `Authority.issue_client`; `on_renewed` is called after each renewal."""
        return self._add(partial(self._authority.issue_client, name), on_renewed)

    def client_context(self, name: str) -> RenewedContext:
        """TLS context of a client that presents its newest certificate."""
        credentials = self.client(name)
        return RenewedContext(credentials, credentials.client_context)

    def renew(self) -> None:
        """Renew what is due. What fails is tried again at the next call."""
        for entry in self._entries:
            credentials = entry.issue()
            certificate = credentials.certificate_file.read_bytes()
            if certificate != entry.certificate:
                entry.on_renewed()
                entry.certificate = certificate
                log.info("renewed the certificate %s", credentials.certificate_file.name)

    def _add(self, issue: Callable[[], Credentials], on_renewed: OnRenewed) -> Credentials:
        credentials = issue()
        self._entries.append(_Entry(issue, credentials.certificate_file.read_bytes(), on_renewed))
        return credentials
