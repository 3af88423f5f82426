"""Brings each new revocation list to a broker that somebody else runs, by a command that the operator gave.

The command runs in a shell with the list's file in $EDGESPLIT_CRL. It runs again until it succeeds; lists that come
meanwhile are brought by its next run. That a certificate is on a list which arrives late is made good by the end of its
session (`revocations`): a device that comes back before then is cut again when it speaks.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

log = logging.getLogger(__name__)

RUN_S = 30.0
AGAIN_S = 5.0


class RevocationCommand:
    """A reader of revocation lists (`revocations.ListReader`) that hands them on."""

    def __init__(self, command: str, revoked_file: Path) -> None:
        self._command = command
        self._file = revoked_file
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="revocation-command", daemon=True)

    def start(self) -> None:
        """Begin with the list that there is."""
        self._changed.set()
        self._thread.start()

    def reload(self) -> None:
        """The list has changed. Returns at once."""
        self._changed.set()

    def stop(self) -> None:
        """No more; a command that runs is waited for."""
        self._stopping.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(RUN_S)

    def _work(self) -> None:
        while True:
            self._changed.wait()
            if self._stopping.is_set():
                return
            self._changed.clear()
            if problem := self._run():
                log.error("--on-revocation failed, the broker may go by an old list: %s", problem)
                self._stopping.wait(AGAIN_S)
                self._changed.set()

    def _run(self) -> str:
        """What went wrong; empty for nothing."""
        try:
            done = subprocess.run(
                self._command, shell=True, timeout=RUN_S, stdin=subprocess.DEVNULL, capture_output=True,
                env={**os.environ, "EDGESPLIT_CRL": str(self._file)},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        said = done.stderr.decode(errors="replace").strip()[-300:]
        return f"status {done.returncode}: {said}" if done.returncode else ""
