"""Delivers each new or renewed revocation list to an external broker, by a shell command that the operator configured.

The command runs with the path of the list in $EDGESPLIT_CRL. It is retried until it succeeds; a list published
meanwhile is delivered by the next run. The effect of a late list is limited by the end of the session
(`pki.revocation`): a device that reconnects before the list arrives is disconnected again when it sends a message.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Timeout of one run of the command."""
RETRY_S = 5.0
"""Pause before a failed command is retried."""


class RevocationCommand:
    """A reader of revocation lists (`pki.revocation.ListReader`) that runs the operator's command for each."""

    def __init__(self, command: str, revoked_file: Path) -> None:
        self._command = command
        self._file = revoked_file
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="revocation-command", daemon=True)
        self.problem = ""
        """Why the newest list has not been delivered; empty once it has."""

    def start(self) -> None:
        """Start the thread; the command runs for the present list first."""
        self._changed.set()
        self._thread.start()

    def reload(self) -> None:
        """Run the command, because the list has changed. Returns at once."""
        self._changed.set()

    def stop(self) -> None:
        """Stop the thread, after a command that is running."""
        self._stopping.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(TIMEOUT_S)

    def _loop(self) -> None:
        while True:
            self._changed.wait()
            if self._stopping.is_set():
                return
            self._changed.clear()  # before the run: a list published during it leads to another run
            self.problem = self._run_command()
            if self.problem:
                log.error("--on-revocation failed, the broker may use an old list: %s", self.problem)
                self._stopping.wait(RETRY_S)
                self._changed.set()

    def _run_command(self) -> str:
        """Run the command once; return the error, empty for success."""
        try:
            result = subprocess.run(
                self._command, shell=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True,
                env={**os.environ, "EDGESPLIT_CRL": str(self._file)},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        error_text = result.stderr.decode(errors="replace").strip()[-300:]
        return f"status {result.returncode}: {error_text}" if result.returncode else ""
