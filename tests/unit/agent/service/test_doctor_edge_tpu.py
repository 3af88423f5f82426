"""What the doctor says of an Edge TPU: seen, allowed, and spoken to or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgesplit.runtime.tflite import edge_tpu_problem
from edgesplit_agent.service.doctor_edge_tpu import check_edge_tpu, delegate_problem


def plugged(root: Path, vendor: str = "18d1", product: str = "9302") -> Path:
    """A device at USB."""
    device = root / "sys/bus/usb/devices/2-1"
    device.mkdir(parents=True)
    (device / "idVendor").write_text(vendor + "\n")
    (device / "idProduct").write_text(product + "\n")
    return root


def test_without_an_accelerator_nothing_is_said(tmp_path: Path) -> None:
    """Nor of another device at USB."""
    assert list(check_edge_tpu(plugged(tmp_path, "046d", "c31c"), lambda: "")) == []


@pytest.mark.parametrize(("vendor", "product"), [("18d1", "9302"), ("1a6e", "089a")])
def test_an_accelerator_whose_delegate_loads_is_good(tmp_path: Path, vendor: str, product: str) -> None:
    """Before and after its firmware is loaded it calls itself otherwise."""
    (found,) = check_edge_tpu(plugged(tmp_path, vendor, product), lambda: "")
    assert found.level == "good" and "its delegate loads" in found.said


def test_a_delegate_that_does_not_load_says_why_and_what_to_do(tmp_path: Path) -> None:
    """Also that an agent may hold it."""
    (found,) = check_edge_tpu(plugged(tmp_path), lambda: "libedgetpu.so.1: no such file")
    assert found.level == "bad" and "no such file" in found.said and "--coral-deb" in found.todo


def test_a_library_that_ends_the_process_is_told_of() -> None:
    """And ends only the one that tried it."""
    assert "another LiteRT" in delegate_problem([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    assert "does not answer" in delegate_problem(["/nowhere"])


def test_here_the_library_is_tried_for_real() -> None:
    """In a process of its own: where it is missing, that is what is said."""
    assert delegate_problem() == edge_tpu_problem()
