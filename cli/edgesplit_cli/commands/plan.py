"""`edgectl plan`: where each layer would run, what that costs, why, and at which bandwidth the choice changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edgesplit.device_profile import is_path
from edgesplit.errors import UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.plan import Link
from edgesplit_cli.local.costs import (
    ANY_DEVICE,
    compare_at_exit,
    count_changed_answers,
    measure_costs,
    predict_costs,
)
from edgesplit_cli.local.model import is_file, open_model
from edgesplit_cli.options.cascade import NAMES as CASCADE
from edgesplit_cli.options.cascade import cascade_body, cascade_options
from edgesplit_cli.options.completion import complete_models_or_files, complete_profiles
from edgesplit_cli.options.plan_limits import answer_option, build_limits, limit_options, offload_option
from edgesplit_cli.options.types import ACCURACY, EXISTING_PATH, FILE, LINK, NEW_FILE, TIER
from edgesplit_cli.output import console, json_option, print_json
from edgesplit_cli.progress import controller_progress
from edgesplit_cli.settings import connect, segment
from edgesplit_cli.views.plan import print_plan

if TYPE_CHECKING:
    from edgesplit_partitioner import Costs
    from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest, FamilyAnswers

Tiers = Sequence[tuple[str, str, Link]]


@dataclass(frozen=True, slots=True)
class CostsSource:
    """Where a plan's costs come from."""

    what: str
    device: str | None
    tiers: Tiers
    input_text: str | None
    bindings: tuple[str, ...]
    samples: Path | None
    lossy: bool
    max_changed: float | None
    answer: str
    quiet: bool


@click.command()
@click.argument("what", metavar="MODEL|FILE|COSTS.json", shell_complete=complete_models_or_files)
@click.option(
    "--device",
    help="Device profile, by name (see `edgectl profiles`) or file.",
    shell_complete=complete_profiles,
)
@click.option(
    "--link", type=LINK, default="wifi", show_default=True,
    help="Link to the cloud: wifi, lte, 3g, or UP/RTT or UP/DOWN/RTT as in 8mbit/40ms.",
)  # fmt: skip
@click.option(
    "--tier", "tiers", type=TIER, multiple=True, metavar="NAME=PROFILE@LINK",
    help="A tier between device and cloud, with its device profile and the link that reaches it, as in"
    " edge=jetson-nano@100mbit/2ms; several from the device outwards. NAME@LINK for a tier of a costs file.",
)  # fmt: skip
@click.option(
    "--trace",
    type=FILE,
    help="Recorded uplink of the device, in mahimahi's format: for --objective p95, and for the true mean.",
)
@click.option(
    "--radio", type=click.Choice(["auto", "none", "wifi", "lte", "3g"]), default="auto", show_default=True,
    help="Radio of the device, for energy. auto: the one the link is named after.",
)  # fmt: skip
@click.option(
    "--partition", default="auto", show_default=True,
    help="auto, device, cloud, or a cut by its name: the last LAYER on the device, 'LAYER + LAYER' through branches.",
)  # fmt: skip
@limit_options
@cascade_options
@answer_option
@offload_option
@click.option("--input", "input_text", help="For a FILE: its input spec, as for `edgectl model push`.")
@click.option("--bind", "bindings", multiple=True, metavar="DIM=N", help="For a FILE: fix a dynamic dimension.")
@click.option(
    "--samples",
    type=EXISTING_PATH,
    help="For a FILE: real input that prices what travels, a folder of JPEG, WAV or NPZ.",
)
@click.option(
    "--explain", "explained", is_flag=True,
    help="Explain the choice: the next best plan, binding limits, and what would change it.",
)  # fmt: skip
@click.option(
    "--plot", type=NEW_FILE, metavar="FILE",
    help="Draw candidates and the best cost over bandwidth, as .svg, .png or .pdf.",
)  # fmt: skip
@json_option
@click.pass_obj
def plan(data: Path, /, what: str, as_json: bool, **options: Any) -> None:
    """Plan a MODEL of the controller, a model FILE measured here, or your own costs file, for a device and a link."""
    from edgesplit_partitioner import describe
    from edgesplit_partitioner.costs.foreign_server import adapt_limits, costs_for_foreign_server
    from edgesplit_partitioner.formulation.constraints import check_keep_first, parse_limits
    from edgesplit_partitioner.planner.early_exit import plan_exit
    from edgesplit_partitioner.planner.planner import tensors_to_confirm
    from edgesplit_partitioner.presentation.plan_json import describe_exit

    if options["plot"]:
        from edgesplit_cli.views.plan_picture import check_file

        check_file(options["plot"])
    limit_names = (
        "keep_raw_input",
        "keep_first",
        "allow_loss",
        "allow_changed",
        "memory_bytes",
        "energy_joules",
        "deadline_s",
        "fallback",
    )
    limits = build_limits(**{name: options[name] for name in limit_names}) | _forced_limit(options["partition"])
    source = CostsSource(
        what=what,
        device=options["device"],
        tiers=options["tiers"],
        input_text=options["input_text"],
        bindings=options["bindings"],
        samples=options["samples"],
        lossy=bool(options["allow_loss"] or options["allow_changed"]),
        max_changed=options["allow_changed"] or None,
        answer=options["answer"],
        quiet=as_json,
    )
    cascade = cascade_body(**{name: options[name] for name in CASCADE})
    variants = _variants_of(data, what)
    if variants:
        _plan_family(data, variants, source, limits, options, cascade, as_json)
        return
    if options["least_accuracy"]:
        raise UsageError(f"{what} is no family: --least-accuracy chooses among the variants of one")
    if cascade and "exit_output" not in cascade:
        raise UsageError(
            f"{what} is no family: --cascade is of two variants of one (`edgectl family create`), or with --exit OUTPUT"
            " of a model that has an output of its first layers"
        )
    costs = _load_costs(data, source)
    objective = options["objective"] or "latency"
    if options["offload"]:
        costs = costs_for_foreign_server(costs, ForeignServer.parse(options["offload"]))
        limits = adapt_limits(limits, costs)
    check_keep_first(costs, parse_limits(limits))
    links = plan_links(costs.tiers, options["link"], options["tiers"], options["trace"], options["radio"])
    codecs = options["codecs"]
    if source.max_changed:
        tensors = tensors_to_confirm(costs, links, objective=objective, limits=limits, codecs=codecs)
        costs = _with_changed_answers(data, source, costs, tensors)
    if cascade:
        planned = plan_exit(
            costs, links, *_exit_arguments(data, source, cascade), objective=objective, limits=limits, codecs=codecs
        )
        costs, result = planned.result.costs, describe_exit(planned)
    else:
        result = describe(costs, links, objective=objective, limits=limits, codecs=codecs)
    reasons = None
    if options["explained"]:
        from edgesplit_partitioner.presentation.explain import explain

        reasons = explain(costs, links, limits, objective=objective, codecs=codecs)
    if as_json:
        print_json(result | ({"explanation": msgspec.to_builtins(reasons)} if reasons else {}))
    else:
        print_plan(result)
    if reasons and not as_json:
        from edgesplit_cli.views.explain import print_reasons

        print_reasons(reasons)
    if options["plot"]:
        _draw(result, options["plot"], as_json)


def _variants_of(data: Path, what: str) -> dict[str, Any] | None:
    """The family of that name at the controller; None for a model or a file."""
    if is_file(what) or Path(what).is_file():
        return None
    model: dict[str, Any] = connect(data).get(f"/v1/models/{segment(what)}")
    return connect(data).get(f"/v1/families/{segment(what)}") if model.get("family") else None


def _plan_family(
    data: Path, family: dict[str, Any], source: CostsSource, limits: dict[str, Any], options: dict[str, Any],
    cascade: dict[str, Any] | None, as_json: bool,
) -> None:  # fmt: skip
    """Plan a family of the controller from its variants' costs, and print or draw the result."""
    from edgesplit_cli.views.family_plan import print_family_plan, print_family_reasons
    from edgesplit_cli.views.family_reasons import family_sentences
    from edgesplit_partitioner.planner.family import Variant, plan_family
    from edgesplit_partitioner.presentation.frontier_picture import render_frontier

    if options["offload"]:
        raise UsageError("--offload is for one model: plan a variant")
    variants = [
        Variant(one["name"], _load_costs(data, replace(source, what=one["model"])), one["accuracy"])
        for one in family["variants"]
    ]
    tiers = variants[0].costs.tiers
    links = plan_links(tiers, options["link"], options["tiers"], options["trace"], options["radio"])
    result = plan_family(
        family["family"], variants, links, objective=options["objective"] or ACCURACY, limits=limits,
        codecs=options["codecs"], least_accuracy=options["least_accuracy"] or 0.0,
        reference=family["reference"],
        **(_cascade_arguments(data, family["family"], cascade) if cascade else {}),
    ).to_builtins()  # fmt: skip
    reasons = list(family_sentences(result)) if options["explained"] else []
    if as_json:
        print_json(result | ({"explanation": reasons} if reasons else {}))
    else:
        print_family_plan(result, explained=options["explained"])
        print_family_reasons(reasons)
    if options["plot"]:
        file: Path = options["plot"]
        with file.open("wb") as into:
            render_frontier(result, into, file.suffix.lower()[1:])
        if not as_json:
            console().print(f"drawn: {file}")


def _cascade_arguments(data: Path, family: str, cascade: dict[str, Any]) -> dict[str, Any]:
    """The cascade that was asked for, and what the family's variants answer to its samples."""
    from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest, FamilyAnswers, check_request

    request = msgspec.convert(cascade, CascadeRequest)
    check_request(request)
    answers = connect(data).get(f"/v1/families/{segment(family)}/answers")
    return {"cascade": request, "answers": msgspec.convert(answers, FamilyAnswers)}


def _exit_arguments(
    data: Path, source: CostsSource, cascade: dict[str, Any]
) -> tuple[CascadeRequest, FamilyAnswers]:  # fmt: skip
    """The early exit that was asked for, and what the model answers to its samples by it and as a whole."""
    from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest, FamilyAnswers, check_request

    request = msgspec.convert(cascade, CascadeRequest)
    check_request(request)
    if is_file(source.what) and not source.what.endswith(".json") and is_model_file(Path(source.what)):
        if source.samples is None:
            raise UsageError("--exit needs --samples: the exit's answers are compared with the whole model's")
        model = open_model(data, source.what, source.input_text, source.bindings)
        return request, compare_at_exit(model, request.exit_output, source.samples, quiet=source.quiet)
    if source.what.endswith(".json") or Path(source.what).is_file():
        raise UsageError(
            f"{source.what} is a costs file, without samples to compare an early exit's answers on: plan a model"
        )
    api, path = connect(data), f"/v1/models/{segment(source.what)}/exit-answers"
    with controller_progress(api, path, f"comparing answers of {source.what}", quiet=source.quiet):
        answers = api.get(path, output=request.exit_output)
    return request, msgspec.convert(answers, FamilyAnswers)


def _forced_limit(partition: str) -> dict[str, str]:
    """The limit that `--partition` sets."""
    if partition == "auto":
        return {}
    return {"force" if partition in ("device", "cloud") else "force_after": partition}


def _draw(plan: dict[str, Any], file: Path, quiet: bool) -> None:
    from edgesplit_cli.views.plan_picture import draw

    draw(plan, file)
    if not quiet:
        console().print(f"drawn: {file}")


def _load_costs(data: Path, source: CostsSource) -> Costs:
    """The costs, from a costs file, from measuring a model file, or from the controller."""
    from edgesplit_partitioner import load_costs

    if source.what.endswith(".json") or (Path(source.what).is_file() and not is_model_file(Path(source.what))):
        return _check_costs_file(load_costs(Path(source.what)), source)
    if is_file(source.what) and not Path(source.what).exists():
        raise UsageError(f"cannot read {source.what}: No such file or directory")
    if source.device is None:
        raise click.UsageError("--device PROFILE is needed to plan a model (see `edgectl profiles`)")
    unknown = [name for name, profile, _ in source.tiers if not profile]
    if unknown:
        raise click.UsageError(
            f"--tier {unknown[0]} needs a device profile, as in {unknown[0]}=jetson-nano@100mbit/2ms"
        )
    if is_file(source.what):
        if source.lossy and source.samples is None:
            option = "--allow-changed" if source.max_changed else "--allow-loss"
            raise UsageError(f"{option} needs --samples: what lossy codecs do is measured on real input")
        return measure_costs(
            open_model(data, source.what, source.input_text, source.bindings), source.device,
            [(name, profile) for name, profile, _ in source.tiers], samples=source.samples, lossy=source.lossy,
            max_changed=source.max_changed, quiet=source.quiet,
        )  # fmt: skip
    if source.input_text or source.bindings or source.samples:
        raise click.UsageError(
            f"{source.what} is a model of the controller: --input, --bind and --samples are for files"
        )
    profiles = [source.device, *(profile for _, profile, _ in source.tiers)]
    has_profile_file = any(is_path(profile) for profile in profiles)
    tiers = [f"{name}={profile}" for name, profile, _ in source.tiers]
    query = {
        "device": ANY_DEVICE if has_profile_file else source.device,
        "tier": (not has_profile_file and tiers) or None,
    }
    api, path = connect(data), f"/v1/models/{segment(source.what)}/costs"
    with controller_progress(api, path, f"planning {source.what}", quiet=source.quiet):
        answer = api.get(path, **query, lossy=source.lossy or None)
    costs = load_costs(answer)
    if not has_profile_file:
        return costs
    return predict_costs(open_model(data, source.what), costs, profiles, [name for name, _, _ in source.tiers])


def _with_changed_answers(data: Path, source: CostsSource, costs: Costs, tensors: Sequence[str]) -> Costs:
    """The costs with the answers that lossy codecs change on these tensors, counted here for a file and by the
    controller for its model; a costs file has its own."""
    from edgesplit_partitioner import load_costs
    from edgesplit_partitioner.planner.changed_answers import with_changes_of

    if is_file(source.what) and not source.what.endswith(".json") and is_model_file(Path(source.what)):
        assert source.samples is not None and source.max_changed is not None
        model = open_model(data, source.what, source.input_text, source.bindings)
        return count_changed_answers(model, costs, tensors, source.samples, source.answer, quiet=source.quiet)
    if source.what.endswith(".json") or Path(source.what).is_file():
        return costs
    api, path = connect(data), f"/v1/models/{segment(source.what)}/costs"
    with controller_progress(api, path, f"comparing answers of {source.what}", quiet=source.quiet):
        counted = api.get(
            path, device=ANY_DEVICE, max_changed=source.max_changed, confirm=list(tensors) or None,
            answer=source.answer or None,
        )  # fmt: skip
    return with_changes_of(costs, load_costs(counted))


def _check_costs_file(costs: Costs, source: CostsSource) -> Costs:
    """`costs`, unless an option contradicts the costs file; UsageError then."""
    name = Path(source.what).name
    if source.device is not None and source.device != costs.device_class:
        owner = f"those of {costs.device_class}" if costs.device_class else "its own"
        raise UsageError(f"--device {source.device}: {name} holds the device's figures, {owner}; leave --device out")
    for tier, profile, link in source.tiers:
        if profile:
            known = " and ".join(costs.tiers[1:-1]) or "none between"
            raise UsageError(
                f"--tier {tier}={profile}: {name} holds the tiers' figures ({known}); "
                f"write a tier of it as {tier}@{link.name or 'LINK'}"
            )
    if source.input_text or source.bindings or source.samples:
        raise UsageError(f"{name} is a costs file: --input, --bind and --samples are for model files")
    return costs


def is_model_file(path: Path) -> bool:
    """True where a file without .json ending is a model, not a costs file under another name."""
    with path.open("rb") as file:
        return not file.read(64).lstrip().startswith(b"{")


def plan_links(
    tiers: Sequence[str], to_cloud: Link, between: Tiers = (), trace: Path | None = None, radio: str = "auto"
) -> dict[str, Any]:
    """The links of a plan by the tiers that they join; the first gets the radio and the bandwidth trace."""
    from edgesplit_partitioner.formulation.bandwidth_trace import read_trace, with_bandwidth_trace
    from edgesplit_partitioner.formulation.radio_energy import RADIOS
    from edgesplit_partitioner.formulation.tiers import VaryingLink

    missing = [name for name, _, _ in between if name not in tiers]
    if missing:
        raise UsageError(f"--tier {missing[0]}: the costs have no such tier, but {', '.join(tiers)}")
    chain = [tiers[0], *(name for name, _, _ in between), tiers[-1]]
    links = [*(link for _, _, link in between), to_cloud]
    first = links[0]
    family = first.name.partition("/")[0] if radio == "auto" else radio
    first_link: Any = with_bandwidth_trace(first, *read_trace(trace)) if trace else first
    if family in RADIOS:
        varying = msgspec.convert(msgspec.to_builtins(first_link), VaryingLink)
        first_link = msgspec.structs.replace(varying, radio=family)
    joined = [first_link, *links[1:]]
    return {f"{low}-{high}": link for low, high, link in zip(chain[:-1], chain[1:], joined, strict=True)}
