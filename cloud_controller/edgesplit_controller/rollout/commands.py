"""Operator commands on a rollout: pause, resume, approve, abort, roll back (pure functions). Conflict where a command
does not apply, naming one that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec.structs import replace

from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_controller.errors import Conflict
from edgesplit_controller.rollout.states import RollbackOutlook, Rollout

Verb = Literal["pause", "resume", "approve", "abort", "rollback"]


def command(rollout: Rollout, verb: Verb, who: str) -> Rollout:
    """The rollout after an operator's command; its consequences follow in the next step."""
    return COMMANDS[verb](rollout, who)


def _pause(rollout: Rollout, who: str) -> Rollout:
    if rollout.state not in ("scheduled", "waiting", "running"):
        raise _conflict(rollout, "cannot be paused")
    return replace(rollout, state="paused", reason=f"paused by {who}")


def _resume(rollout: Rollout, who: str) -> Rollout:
    """Continue; evidence that the current stage lacks is no longer required."""
    if rollout.state != "paused":
        raise _conflict(rollout, "is not paused")
    state = "running" if rollout.began else "scheduled"
    return replace(rollout, state=state, reason="", excused=rollout.stage)


def _approve(rollout: Rollout, who: str) -> Rollout:
    if rollout.state != "waiting":
        raise _conflict(rollout, "does not wait for approval")
    return replace(rollout, state="running", reason="", approved=rollout.stage + 1)


def _abort(rollout: Rollout, who: str) -> Rollout:
    if rollout.has_ended or rollout.state in ("aborting", "rolling back"):
        raise _conflict(rollout, "cannot be aborted")
    return replace(rollout, state="aborting", outcome="aborted", reason=f"aborted by {who}")


def _rollback(rollout: Rollout, who: str) -> Rollout:
    if rollout.state == "rolled back":
        raise Conflict(f"rollout {rollout.id} was rolled back already: deploy its release again to return to it")
    if rollout.state == "rolling back":
        raise _conflict(rollout, "is being rolled back already")
    if not rollout.began:
        raise Conflict(f"rollout {rollout.id} has not begun: `edgectl rollout abort {rollout.id}` ends it")
    return replace(rollout, state="rolling back", reason=f"rolled back by {who}", ended=0.0)


def check_can_roll_back(rollout: Rollout, outlook: RollbackOutlook) -> None:
    """Conflict if a rollback would change no device, saying why and what to do instead."""
    if outlook.changed:
        return
    why, instead = "it has not reached any device", f"`edgectl rollout abort {rollout.id}` ends it"
    if outlook.taken:
        newer = f"rollout {outlook.taken_by}" if outlook.taken_by else "a newer rollout"
        why = f"{newer} decides what its devices run now"
        instead = f"roll that one back (`edgectl rollout rollback {outlook.taken_by or 'ID'}`)"
    elif outlook.lost:
        why = "the release that its devices ran before was removed"
        instead = f"deploy the model to them (`edgectl deploy {rollout.model} --to ...`)"
    elif outlook.same_before and rollout.model == AGENT_MODEL:
        why = "its devices had no earlier release of the agent to go back to, and an agent cannot be removed this way"
        instead = "deploy another version of the agent to them"
    elif outlook.same_before:
        why = "its devices ran this release before it, too"
        instead = f"deploy another version (`edgectl deploy {rollout.model}@VERSION --to ...`)"
    elif outlook.undone:
        why, instead = "its devices were returned already", "deploy its release again to return to it"
    elif rollout.has_ended:
        instead = "there is nothing to undo"
    raise Conflict(f"rollout {rollout.id} cannot be rolled back, and nothing was changed: {why}; {instead}")


def _conflict(rollout: Rollout, what: str) -> Conflict:
    hint = ""
    if rollout.has_ended and rollout.state != "rolled back":
        hint = f"; `edgectl rollout rollback {rollout.id}` returns its devices to what they ran before"
    return Conflict(f"rollout {rollout.id} {what}: it is {rollout.state}{hint}")


COMMANDS: Mapping[Verb, Callable[[Rollout, str], Rollout]] = {
    "pause": _pause, "resume": _resume, "approve": _approve, "abort": _abort, "rollback": _rollback,
}  # fmt: skip
