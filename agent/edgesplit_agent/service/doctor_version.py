"""What a doctor sees of the agent's own versions: which one runs, and what was tried and given up."""

from __future__ import annotations

from collections.abc import Iterator

import edgesplit
from edgesplit_agent.self_update.version_store import Shelf
from edgesplit_agent.service.doctor_findings import Finding, good, warning
from edgesplit_agent.state.data_folder import DataFolder

AGAIN = "deploy another version, or this one again: `edgectl agent deploy`"


def versions(folder: DataFolder) -> Iterator[Finding]:
    """The version that the next start takes, whole on disk, and nothing that failed."""
    shelf = Shelf(folder.path)
    known = shelf.read()
    if not known.running:
        yield good("version", f"{edgesplit.__version__}, as it was installed")
    elif trouble := shelf.damage(known.running):
        yield warning(
            "version", f"release {known.running[:12]}: {trouble}", "nothing: the next start puts it together again"
        )
    else:
        how = "on trial" if known.trial else "found healthy"
        yield good("version", f"release {known.running[:12]} of the agent, {how}")
    for release, why in sorted({**known.bad, **known.refused}.items()):
        yield warning("version", f"release {release[:12]} does not run here: {why}", AGAIN)
