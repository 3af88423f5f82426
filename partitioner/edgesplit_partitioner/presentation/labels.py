"""What people call the parts of a plan, as `description.describe` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgesplit.links import LINKS


def link_name(link: Mapping[str, Any]) -> str:
    """What people call a link, as in `lte/10`; empty where it was spelt in figures, which stand beside it anyway."""
    name = str(link.get("name") or "")
    return name if name.partition("/")[0] in LINKS else ""


def travels(row: Mapping[str, Any]) -> str:
    """How a cut's tensors travel, where that is not raw: ` int8 +zstd`; empty for raw."""
    lossy = dict.fromkeys(codec for codec in (row.get("codecs") or {}).values() if codec != "raw")
    return "".join(f" {codec}" for codec in lossy) + (" +zstd" if row.get("compress") else "")
