"""Doctor's check of the agent's own versions: which one runs, and which were tried and given up."""

from __future__ import annotations

from collections.abc import Iterator

import edgesplit
from edgesplit.observability.doctor_findings import Finding, good, warning
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.state.data_folder import DataFolder

DEPLOY_AGAIN = "deploy another version, or this one again: `edgectl agent deploy`"


def check_versions(folder: DataFolder) -> Iterator[Finding]:
    """The version that the next start takes is undamaged on disk, and none has failed."""
    store = VersionStore(folder.path)
    state = store.read()
    if not state.running:
        yield good("version", f"{edgesplit.__version__}, as it was installed")
    elif trouble := store.damage(state.running):
        yield warning(
            "version", f"release {state.running[:12]}: {trouble}", "nothing: the next start puts it together again"
        )
    else:
        how = "on trial" if state.trial else "found healthy"
        yield good("version", f"release {state.running[:12]} of the agent, {how}")
    for release, why in sorted({**state.rejected, **state.refused}.items()):
        yield warning("version", f"release {release[:12]} does not run here: {why}", DEPLOY_AGAIN)
