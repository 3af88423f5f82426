"""What tests share: harnesses around real parts, builders of models and releases, and brute-force references."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
