"""Doctor's check of an Edge TPU: that it is present, may be used, and works with the installed library and LiteRT.

The delegate is loaded in a process of its own, because a library built for another interface may crash it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgesplit.observability.doctor_findings import Finding, bad, good, warning
from edgesplit.runtime.tflite import EDGE_TPU_LIBRARY

USB = {("1a6e", "089a"): "at USB, before its first use", ("18d1", "9302"): "at USB"}
"""Place of a USB device by vendor and product number: an Edge TPU changes both once its firmware is loaded."""
APEX = "dev/apex_0"
TIMEOUT_S = 30.0
_TRY = "from edgesplit.runtime.tflite import edge_tpu_problem; print(edge_tpu_problem())"


def check_edge_tpu(root: Path = Path("/"), trouble: Callable[[], str] | None = None) -> Iterator[Finding]:
    """The finding about the Edge TPU; none where there is neither the accelerator nor its library. `trouble` replaces
    `delegate_problem`."""
    where = list(_find_devices(root))
    if not where:
        if trouble is None and _has_library():
            yield warning(
                "accelerator", "libedgetpu is installed, and no Edge TPU is detected", "connect it to a USB 3 port"
            )
        return
    apex = root / APEX
    if apex.exists() and not os.access(apex, os.R_OK | os.W_OK):
        yield bad(
            "accelerator",
            f"{apex} cannot be opened by this user",
            "usermod -aG apex edgesplit-agent, then restart the agent",
        )
        return
    why = (trouble or delegate_problem)()
    if not why:
        yield good("accelerator", f"Edge TPU {where[0]}, and its delegate loads")
        return
    yield bad(
        "accelerator",
        f"Edge TPU {where[0]}, and its delegate does not load: {why}",
        "a running agent may use it: stop it and check again; else install a libedgetpu built with TensorFlow 2.16 or"
        " newer (edgectl adopt --coral --coral-deb FILE)",
    )


def delegate_problem(command: Sequence[str] = (sys.executable, "-c", _TRY)) -> str:
    """Why the delegate does not load when `command` loads it; empty where it does."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer ({type(error).__name__})"
    if completed.returncode != 0:
        return f"it ended the process that loaded it ({completed.returncode}): it was built for another LiteRT"
    return completed.stdout.strip()


def _find_devices(root: Path) -> Iterator[str]:
    if (root / APEX).exists():
        yield f"at /{APEX}"
    for device in sorted((root / "sys/bus/usb/devices").glob("*")):
        try:
            usb_id = _line(device / "idVendor"), _line(device / "idProduct")
        except OSError:
            continue
        if usb_id in USB:
            yield USB[usb_id]


def _line(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _has_library() -> bool:
    try:
        ctypes.CDLL(EDGE_TPU_LIBRARY)
    except OSError:
        return False
    return True
