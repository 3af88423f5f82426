"""Whether an Edge TPU is there, may be used, and is spoken to by the library and the LiteRT that are installed.

The delegate is loaded in a process of its own: a library that was built for another interface may end it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from edgesplit.runtime.tflite import EDGE_TPU_LIBRARY
from edgesplit_agent.service.doctor_findings import Finding, bad, good, warning

USB = {("1a6e", "089a"): "at USB, before its first use", ("18d1", "9302"): "at USB"}
"""Vendor and product: it shows another of each once its firmware is loaded."""
APEX = "dev/apex_0"
PATIENCE_S = 30.0
_TRY = "from edgesplit.runtime.tflite import edge_tpu_trouble; print(edge_tpu_trouble())"


def edge_tpu(root: Path = Path("/"), trouble: Callable[[], str] | None = None) -> Iterator[Finding]:
    """Nothing where there is neither the accelerator nor its library."""
    where = list(_seen(root))
    if not where:
        if trouble is None and _has_library():
            yield warning("accelerator", "libedgetpu is installed, and no Edge TPU is seen", "plug it in, into USB 3")
        return
    apex = root / APEX
    if apex.exists() and not os.access(apex, os.R_OK | os.W_OK):
        yield bad("accelerator", f"{apex} cannot be opened by us", "usermod -aG apex edgesplit-agent, start it again")
        return
    why = (trouble or loads)()
    if not why:
        yield good("accelerator", f"Edge TPU {where[0]}, and its delegate loads")
        return
    yield bad(
        "accelerator",
        f"Edge TPU {where[0]}, and its delegate does not load: {why}",
        "an agent that runs holds it: stop it and look again; else install a libedgetpu built with TensorFlow 2.16 or"
        " newer (edgectl adopt --coral --coral-deb FILE)",
    )


def loads() -> str:
    """Why the delegate does not load; empty where it does."""
    try:
        done = subprocess.run([sys.executable, "-c", _TRY], capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer ({type(error).__name__})"
    if done.returncode != 0:
        return f"it ended the process that loaded it ({done.returncode}): it was built for another LiteRT"
    return done.stdout.strip()


def _seen(root: Path) -> Iterator[str]:
    if (root / APEX).exists():
        yield f"at /{APEX}"
    for device in sorted((root / "sys/bus/usb/devices").glob("*")):
        try:
            known = _line(device / "idVendor"), _line(device / "idProduct")
        except OSError:
            continue
        if known in USB:
            yield USB[known]


def _line(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _has_library() -> bool:
    try:
        ctypes.CDLL(EDGE_TPU_LIBRARY)
    except OSError:
        return False
    return True
