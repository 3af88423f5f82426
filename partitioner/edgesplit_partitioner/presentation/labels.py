"""Labels for people of the parts of a plan, as `plan_json.describe` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgesplit.links import LINKS


def link_name(link: Mapping[str, Any]) -> str:
    """The name of a link, as in `lte/10`; empty where it was given in figures, which are shown beside it anyway."""
    name = str(link.get("name") or "")
    return name if name.partition("/")[0] in LINKS else ""


def codec_suffix(row: Mapping[str, Any]) -> str:
    """The codecs of a cut's tensors as a suffix, as in ` int8 +zstd`; empty for raw."""
    lossy = dict.fromkeys(codec for codec in (row.get("codecs") or {}).values() if codec != "raw")
    return "".join(f" {codec}" for codec in lossy) + (" +zstd" if row.get("compress") else "")
