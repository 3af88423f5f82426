"""Faults found in use, each with its regression test."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edgesplit.errors import TrustError, UsageError
from edgesplit.input_spec import parse_input_spec, prepare
from edgesplit.process import lifecycle
from edgesplit.trust.store import TrustStore
from edgesplit_agent.state import data_folder as agent_folder
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.tuf.repository import Repository
from edgesplit_offload.revocation import RevokedSerials


def test_a_restored_backup_is_trusted_after_the_next_start(tmp_path: Path) -> None:
    """Devices saw newer metadata than the backup holds: the controller signs anew at its start, and they go on."""
    here = tmp_path / "tuf"
    now = [1_800_000_000.0]
    repository = Repository(here, now=lambda: now[0])
    shutil.copytree(here, tmp_path / "backup")
    now[0] += 60
    repository.renew()
    device = TrustStore(tmp_path / "device", repository.root_bytes, now=lambda: now[0])
    device.refresh(lambda path, most: repository.read(path))

    shutil.rmtree(here)
    shutil.copytree(tmp_path / "backup", here)
    now[0] += 60
    restored = Repository(here, now=lambda: now[0])
    restored.renew()

    device.refresh(lambda path, most: restored.read(path))


def test_a_parent_that_died_before_the_watch_began_is_noticed() -> None:
    """A child that starts slowly has another parent by then: it receives its parent's pid, and ends."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    with pytest.raises(UsageError, match="ended already"):
        lifecycle.end_with_parent(gone.pid)


def test_a_stop_signal_during_a_locked_event_is_not_lost() -> None:
    """Setting an event inside the handler deadlocked when the main thread held the event's lock just then."""
    script = (
        "import threading, os, signal\n"
        "from edgesplit.process.lifecycle import on_stop_signals\n"
        "stop = threading.Event()\n"
        "on_stop_signals(stop.set)\n"
        "with stop._cond:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert stop.wait(20)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 0


def test_invalid_jpeg_bytes_were_a_server_error() -> None:
    """They are the caller's error now; as a server's error they opened the circuit breaker and showed an object's
    address."""
    spec = parse_input_spec("image/jpeg 8x8")

    with pytest.raises(UsageError, match=r"not a whole JPEG$"):
        prepare(spec, np.zeros(64, np.uint8).tobytes())


def test_a_full_disk_does_not_block_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session number cannot be stored, and still grows: by the clock, and within the process."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(agent_folder, "write_durably", full)
    folder = DataFolder(tmp_path)

    first, second = folder.next_session(1_800_000_000.0), folder.next_session(1_800_000_000.0)

    assert 1_800_000_000 <= first < second


SIGNALLED_ASIDE = """
import signal, threading
from edgesplit.process.lifecycle import on_stop_signals, wait_until
stop = threading.Event()
on_stop_signals(stop.set)
aside = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Timer(0.2, aside).start()
wait_until(stop)
"""


def test_a_stop_signal_that_another_thread_received_was_lost() -> None:
    """The main thread slept on, and a controller that had received SIGTERM ran for ever."""
    subprocess.run([sys.executable, "-c", SIGNALLED_ASIDE], timeout=60, check=True)


def test_an_invalid_revocation_list_version_ended_the_offload_server(tmp_path: Path) -> None:
    """The binding's own exception was raised, which no caller handled."""
    authority = Authority(tmp_path / "keys")
    good = x509.load_pem_x509_crl(authority.revocation_list([7])).public_bytes(Encoding.DER)
    assert good.count(b"\x02\x01\x01\x30") == 1
    spoilt = base64.encodebytes(good.replace(b"\x02\x01\x01\x30", b"\x02\x01\x09\x30"))
    (tmp_path / "list.pem").write_bytes(b"-----BEGIN X509 CRL-----\n" + spoilt + b"-----END X509 CRL-----\n")
    with pytest.raises(TrustError, match="is no revocation list"):
        RevokedSerials(tmp_path / "list.pem", authority.certificate_file)


INTERRUPTED_WHILE_LOADING = """
import os, signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "edgesplit_cli.main":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
from edgesplit_cli.start import main
main()
"""


def test_ctrl_c_while_the_commands_were_loaded_printed_a_traceback() -> None:
    """In the first half second; now it ends as it does later."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_WHILE_LOADING], timeout=60, capture_output=True)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_an_agent_starts_without_any_option() -> None:
    """A check of `--gateway-metrics` was put to its default too, and no agent started any more."""
    from edgesplit_agent.main import build_parser

    assert build_parser().parse_args(["run", "--data", "somewhere"]).gateway_metrics is None
