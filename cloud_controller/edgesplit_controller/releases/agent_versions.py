"""Which agents can read a model's releases: manifests have fields that agents before some version refuse."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgesplit_controller.errors import Conflict
from edgesplit_controller.storage.tables.core import Device, Model

FIELDS_SINCE = (0, 3)
"""First version of the agent that reads manifests with a lineage, an output kind, an input spec of more than stretched
JPEGs and sound, or with labels of golden inputs."""
NEW_WORDS = re.compile(r"^image/(png|webp|raw)|\b(letterbox|crop|int8|fp16)\b")
"""Words of input specs that agents before that version do not know."""
MOST_NAMED = 8


def check_agents(model: Model, devices: Sequence[Device], *, judged: bool = False) -> None:
    """Conflict naming the devices whose agent is too old to read releases of this model, which have labels of golden
    inputs if `judged`. Those that never reported are accepted."""
    what = _new_field(model, judged=judged)
    if not what:
        return
    old = sorted(device.name for device in devices if _is_before((device.birth or {}).get("agent_version", "")))
    if old:
        raise Conflict(
            f"{model.ref} {what}, and agents before 0.3 refuse releases that say so:"
            f" {', '.join(old[:MOST_NAMED])}{' and others' if len(old) > MOST_NAMED else ''}; `edgectl agent deploy`"
            " updates them"
        )


def _new_field(model: Model, *, judged: bool) -> str:
    """What of its releases old agents do not know; empty where nothing is."""
    if model.lineage is not None:
        return f"stands in for {model.lineage['base']}"
    if "output_kind" in model.shown:
        return "has an output kind"
    if NEW_WORDS.search(model.input_text):
        return f"takes {model.input_text.split()[0]} in a way that is new"
    return "is judged by its answers" if judged else ""


def _is_before(version: str) -> bool:
    parts = re.match(r"(\d+)\.(\d+)", version)
    return parts is not None and (int(parts[1]), int(parts[2])) < FIELDS_SINCE
