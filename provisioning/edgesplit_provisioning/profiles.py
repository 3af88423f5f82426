"""Device profiles of boards with accessories, for every way in which an agent comes onto a device."""

from __future__ import annotations

CORAL_PROFILES = {"raspberrypi4": "coral-usb-rpi4"}
"""Device profile of a board with an Edge TPU at its USB, by that of the board."""
