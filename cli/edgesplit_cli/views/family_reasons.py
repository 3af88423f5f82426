"""Why a family's plan chose its variant, and why not each other one, as sentences (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgesplit_cli.output import ms
from edgesplit_cli.views.explain import MIN_SHOWN_S, PARTS, objective_text

ACCURACY = "accuracy"


def family_sentences(plan: Mapping[str, Any]) -> Iterator[str]:
    """The reasons of a plan as `FamilyResult.to_builtins` returns it."""
    best, deadline_s, accuracies = plan["best"], plan["deadline_s"], plan["accuracies"]
    deadline = f" within {plan['deadline_s'] * 1e3:g} ms" if deadline_s else ""
    floor = f" of at least {plan['least_accuracy']:.1%} accuracy" if plan["least_accuracy"] else ""
    if plan["objective"] == ACCURACY:
        most = f"variant that agrees most with {plan['reference']}" if plan["reference"] else "most accurate variant"
        claim = f"the {most}{floor} whose best cut answers{deadline or ', whatever it takes'}"
    else:
        claim = f"of all variants{floor} the least {objective_text(plan['objective'])}{deadline}"
    chosen = plan["variants"][best["variant"]]
    parts = [f"{part} {ms(chosen['split'][part])}" for part in PARTS if chosen["split"].get(part, 0.0) >= MIN_SHOWN_S]
    total = f": {' + '.join(parts)}" if len(parts) > 1 else ""
    share = _share(plan, best["accuracy"])
    yield f"Why {best['row']}? It is {claim}: {share} in {ms(best['seconds'])} ms{total}."
    for name in sorted((name for name in plan["variants"] if name != best["variant"]), key=lambda n: -accuracies[n]):
        yield _why_not(plan, name)
    for name, reason in plan["left_out"].items():
        yield f"Why not {name}? {reason[:1].upper()}{reason[1:]}."
    yield from _proof(plan)
    regret = plan["regret"]
    if regret is not None:
        yield (
            f"The table has {len(plan['table']['rows'])} rows; under other server loads and device speeds the best of"
            f" them costs at most {regret:.1%} more than the best of all cuts of all variants."
        )


_LESS_ACCURATE = ("it is less accurate", "it is as accurate")


def _share(plan: Mapping[str, Any], share: float) -> str:
    """How often a variant is right, or answers as the reference does."""
    return f"{share:.1%} as {plan['reference']}" if plan["reference"] else f"{share:.1%} right"


def _why_not(plan: Mapping[str, Any], name: str) -> str:
    best, accuracies, own = plan["best"], plan["accuracies"], plan["variants"][name]
    chosen, accuracy = accuracies[best["variant"]], accuracies[name]
    points = 100 * (accuracy - chosen)
    right = f"{_share(plan, accuracy)}, {points:+.1f} points" if points else f"{_share(plan, accuracy)}, as many"
    faster_s = best["seconds"] - own["seconds"]
    pace = f"{ms(abs(faster_s))} ms {'less' if faster_s > 0 else 'more'}"
    head = f"Why not {name}? {right}; its best cut, {own['row']}, takes {ms(own['seconds'])} ms, {pace}"
    if plan["deadline_s"] and own["seconds"] > plan["deadline_s"]:
        return f"{head}: beyond the deadline."
    if plan["objective"] == ACCURACY:
        less, equal = ("it agrees less", "it agrees as much") if plan["reference"] else _LESS_ACCURATE
        return f"{head}: {less if points < 0 else f'{equal} and is slower'}."
    return f"{head}: its {objective_text(plan['objective'])} is greater."


def _proof(plan: Mapping[str, Any]) -> Iterator[str]:
    best, proof = plan["best"], plan["certificate"]
    equals = "as accurate" if plan["objective"] == ACCURACY else "above the floor"
    if plan["reference"] and plan["objective"] == ACCURACY:
        equals = "that agrees as much"
    yield (
        f"No cut of a variant {equals} is better than {_value(plan, proof['lower_bound'])}: the choice is within"
        f" {100 * proof['gap']:.3g} % of that bound."
    )
    ahead_s = proof["more_accurate_s"]
    if ahead_s is not None:
        better = "variant that agrees more" if plan["reference"] else "more accurate variant"
        yield f"No cut of a {better} takes less than {ms(ahead_s)} ms, which is beyond the deadline."
    elif plan["objective"] == ACCURACY and best["accuracy"] == max(plan["accuracies"].values()):
        yield "No variant agrees more." if plan["reference"] else "No variant is more accurate."


def _value(plan: Mapping[str, Any], value: float) -> str:
    """A value of the objective with its unit; none where times and joules are weighed."""
    if "energy" in plan["objective"]:
        return f"{value:.4g} J" if plan["objective"] == "energy" else f"{value:.4g}"
    return f"{ms(value)} ms"
