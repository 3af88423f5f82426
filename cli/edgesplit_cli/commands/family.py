"""`edgectl family`: models of one task as one model, chosen among per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit_cli.local.true_boxes import boxes_of
from edgesplit_cli.options.completion import complete_models
from edgesplit_cli.options.types import EXISTING_PATH, ParsedType
from edgesplit_cli.output import console, json_option, print_json, table
from edgesplit_cli.progress import controller_progress
from edgesplit_cli.sample_upload import SampleSource
from edgesplit_cli.settings import connect, segment

MOST_SAMPLES = 10_000
COLUMNS = ("variant", "model", ">accuracy", ">at least (90 % sure)", ">right")
COMPARED = ("variant", "model", ">agreement", ">at least (90 % sure)", ">as the reference")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What `--answer` says: the rule of one model, or of all."""

    model: str
    """Empty: of all models."""
    rule: str


def parse_answer(text: str) -> _Answer:
    """RULE, or MODEL=RULE."""
    before, mark, after = text.partition("=")
    answer = _Answer(before.strip(), after.strip()) if mark and ":" not in before else _Answer("", text.strip())
    if not answer.rule:
        raise UsageError(f"answer {text[:80]!r}: give RULE or MODEL=RULE, as in boxes:yolox or yolo-big=boxes:yolov8")
    return answer


@click.group()
def family() -> None:
    """Create families of models of one task, list them, show one, remove them."""


@family.command()
@click.argument("name")
@click.option(
    "--variant", "variants", multiple=True, required=True, metavar="MODEL[=LABELS.json]",
    shell_complete=complete_models,
    help="A model of the family, NAME or NAME@VERSION; several. Where its classes are others than the first one's: a"
    " file with the label of each of its classes, -1 for none, as a JSON list.",
)  # fmt: skip
@click.option(
    "--samples", type=EXISTING_PATH, required=True,
    help="Input on which the models are compared: a folder of JPEG or NPZ. By labels accuracies are measured: classes"
    " in labels.json ({\"a.jpg\": 3}), or boxes beside each sample, in a.json"
    " ([{\"box\": [left, top, right, bottom], \"label\": 3}], parts of the frame's width and height).",
)  # fmt: skip
@click.option(
    "--answer", "answers", multiple=True, type=ParsedType("answer", parse_answer), metavar="[MODEL=]RULE",
    help="When two answers are the same: class:OUTPUT, boxes:LAYOUT[:THRESHOLD] (yolox, yolov8, ssd, scores+boxes), or"
    " close:0.01[:OUTPUT]; repeatable, as each model may have its own layout. [default: the class of the only output]",
)  # fmt: skip
@click.option(
    "--reference", metavar="MODEL", shell_complete=complete_models,
    help="Without labels: the model that the others are compared with. [default: the last --variant]",
)  # fmt: skip
@json_option
@click.pass_obj
def create(
    data: Path, name: str, variants: tuple[str, ...], samples: Path, answers: tuple[_Answer, ...],
    reference: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Store models of one task as the family NAME, with their accuracies on labelled samples.

    A family is planned, deployed, asked and undeployed by its name, as a model is. Detectors answer by boxes in one
    form, whatever layouts they have. Without labels it is known how often each model agrees with the reference.
    """
    api, path = connect(data), "/v1/families"
    requested = _with_rules([_variant(text) for text in variants], answers)
    rule = next((answer.rule for answer in answers if not answer.model), "")
    kind = (rule or requested[0].get("answer", "class")).partition(":")[0]
    body = {
        "name": name, "variants": requested, "samples": _samples(api, requested[0]["model"], samples, kind),
        "answer": rule, "reference": reference or "",
    }  # fmt: skip
    with controller_progress(api, path, f"measuring {len(variants)} variants", quiet=as_json):
        created: dict[str, Any] = api.post(path, body)
    _print(created, as_json)


@family.command("list")
@json_option
@click.pass_obj
def list_(data: Path, as_json: bool) -> None:
    """List families with their variants."""
    families: list[dict[str, Any]] = connect(data).get("/v1/families")
    if as_json:
        print_json(families)
        return
    rows = [
        (
            one["family"], ", ".join(f"{v['model']} {v['accuracy']:.1%}" for v in one["variants"]), str(one["samples"]),
            f"agreement with {one['reference']}" if one["reference"] else "accuracy",
        )
        for one in families
    ]  # fmt: skip
    console().print(table(("family", "variants", ">samples", "measured"), rows))


@family.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(data: Path, name: str, as_json: bool) -> None:
    """Show the variants of a family with their accuracies."""
    _print(connect(data).get(f"/v1/families/{segment(name)}"), as_json)


@family.command()
@click.argument("name")
@json_option
@click.pass_obj
def remove(data: Path, name: str, as_json: bool) -> None:
    """Remove a family, or one version of it, with its releases; its variants stay. Refused while it is in use."""
    api = connect(data)
    api.get(f"/v1/families/{segment(name)}")  # a model is removed by `edgectl model remove`
    removed: dict[str, Any] = api.delete(f"/v1/models/{segment(name)}")
    if as_json:
        print_json(removed)
        return
    console().print(f"removed {', '.join(removed['models'])}")


def _variant(text: str) -> dict[str, Any]:
    """A variant from MODEL or MODEL=LABELS.json."""
    model, _, file = text.partition("=")
    if not file:
        return {"model": model}
    try:
        labels = msgspec.json.decode(Path(file).read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file}: {error}; it should be a list with the label of each class, [0, 1, -1]") from error
    return {"model": model, "labels": labels}


def _with_rules(requested: list[dict[str, Any]], answers: Sequence[_Answer]) -> list[dict[str, Any]]:
    """The variants with the answer rules that are for one model."""
    own = {answer.model: answer.rule for answer in answers if answer.model}
    known = {one["model"] for one in requested} | {one["model"].partition("@")[0] for one in requested}
    if unknown := sorted(set(own) - known):
        raise UsageError(f"--answer {unknown[0]}=…: {unknown[0]} is none of the variants {', '.join(sorted(known))}")
    rules = {one["model"]: own.get(one["model"]) or own.get(one["model"].partition("@")[0]) for one in requested}
    return [{**one, "answer": rules[one["model"]]} if rules[one["model"]] else one for one in requested]


def _samples(api: ControllerClient, model: str, location: Path, kind: str) -> list[dict[str, Any]]:
    """The samples, read as the first variant takes them, with what they show where that is known; UsageError where it
    is of some only. Values that are merely close are compared with the reference alone."""
    source = SampleSource.of(api, model)
    samples = list(source.read(location, MOST_SAMPLES))
    shown: list[dict[str, Any]] = [{} for _ in samples]
    if kind == "boxes":
        shown = [{} if (boxes := boxes_of(one.file)) is None else {"boxes": boxes} for one in samples]
    elif kind == "class":
        shown = [{} if one.label is None else {"label": one.label} for one in samples]
    without = [sample.file for sample, known in zip(samples, shown, strict=True) if not known]
    if 0 < len(without) < len(samples):
        beside = without[0].with_suffix(".json") if kind == "boxes" else without[0].parent / "labels.json"
        raise UsageError(
            f"{len(without)} of {len(samples)} samples have no label, {without[0].name} among them: name what they show"
            f" in {beside}, or label none of them"
        )
    body = source.body([replace(sample, label=None) for sample in samples])["samples"]
    return [{**sent, **known} for sent, known in zip(body, shown, strict=True)]


def _print(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(shown)
        return
    reference = shown["reference"]
    kind = "samples without labels" if reference else "labelled samples"
    console().print(f"{shown['family']}: {len(shown['variants'])} variants on {shown['samples']} {kind}")
    if reference:
        console().print(
            f"no labels: what is known is how often each answers as {reference} does, and not how often it is right",
            soft_wrap=True,
        )
    rows = [
        (
            variant["name"], variant["model"], f"{variant['accuracy']:.1%}", f"{variant['least_accuracy']:.1%}",
            f"{variant['right']} of {shown['samples']}",
        )
        for variant in shown["variants"]
    ]  # fmt: skip
    console().print(table(COMPARED if reference else COLUMNS, rows))
