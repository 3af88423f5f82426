"""Costs and plans of registered models: measured here once, predicted per device profile, planned by the partitioner.

Measurements are kept and reused until samples are added or `profile` asks for new ones. What is measured runs in child
processes of the partitioner's. Callers run this in a worker thread, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import msgspec
from sqlalchemy import select

from edgesplit.device_profile import DeviceProfile, list_profiles, load_profile
from edgesplit.errors import ModelRefused, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.links import parse_link
from edgesplit.plan import Link
from edgesplit_controller.errors import unknown
from edgesplit_controller.model_registry.registry import LoadedModel, Registry
from edgesplit_controller.storage.database import Database, Measurement, Model
from edgesplit_partitioner import Costs, Plan, describe, plan
from edgesplit_partitioner.costs.build import build_costs, with_tier
from edgesplit_partitioner.costs.foreign_server import check_servable, foreign_costs, possible
from edgesplit_partitioner.costs.from_telemetry import Measured, as_measured
from edgesplit_partitioner.formulation.constraints import as_limits, check_first
from edgesplit_partitioner.profiling.codecs import CodecMeasures, measure_codecs, with_codecs
from edgesplit_partitioner.profiling.layers import Samples, measure_input, measure_layers, measure_samples
from edgesplit_partitioner.profiling.ort_profile import LayerTime
from edgesplit_partitioner.profiling.slices import Cuts, Whole, believed, corrected, measured_whole
from edgesplit_partitioner.slicing import atoms, cut_sets, cut_slices

TIERS = "device-cloud"
EDGE = "edge"
"""The tier of a gateway."""
HERE = "cloud"
"""The tier that this machine's times stand for."""
ASSUMED_LINK = "wifi"
"""Where neither the operator nor the device's claim says one."""
MEASURED_SAMPLES = 16
OWN_CLASS = "generic-x86"
"""Whose predictions a costs file holds where no device was named."""
FEW_SAMPLES = "lossy codecs need two samples at least, one to choose by and one to confirm by, not {}"
MOST_TABLES = 16
"""Tables of a model whose slices' measurements are kept."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asks of a plan."""

    partition: str = "auto"
    """`auto`, `device`, `edge` (all on the gateway), `cloud`, or the last layer on the device."""
    limits: dict[str, Any] = {}
    codecs: tuple[str, ...] | None = None
    objective: str | dict[str, float] = "latency"
    """One of the planner's objectives, or a weight for each of several."""
    encrypt: bool = False
    """Its slices are encrypted: which tells nothing to the planner."""
    offload: str = ""
    """A server that is not ours (`edgesplit.foreign_server`), where the far halves run; empty: the device's own."""

    @property
    def lossy(self) -> bool:
        """Some output error is allowed, so that lossy codecs are worth measuring."""
        return bool(self.limits.get("max_loss", self.limits.get("max-loss")))

    @property
    def server(self) -> ForeignServer | None:
        """The server that is not ours, where one is named; UsageError where it is no address of one."""
        return ForeignServer.parse(self.offload) if self.offload else None

    def planner_limits(self) -> dict[str, Any]:
        """The limits as the planner takes them."""
        if self.partition == "auto":
            return dict(self.limits)
        if "force" in self.limits or "force_after" in self.limits:
            raise UsageError("give a partition or force a cut by a limit, not both")
        key = "force" if self.partition in ("device", EDGE, "cloud") else "force_after"
        return {**self.limits, key: self.partition}

    def as_options(self) -> dict[str, Any]:
        """For the records."""
        return {
            "partition": self.partition,
            "limits": self.limits,
            "codecs": list(self.codecs) if self.codecs else None,
            "objective": self.objective,
            "encrypt": self.encrypt,
            **({"offload": self.offload} if self.offload else {}),
        }


@dataclass(frozen=True, slots=True)
class Through:
    """The gateway by which a class of devices reaches this machine."""

    device_class: str
    """Its own."""
    uplink: Link
    """From it to this machine."""


class Measure(Protocol):
    """How a model is measured on this machine."""

    def layers(self, loaded: LoadedModel, frames: Sequence[bytes]) -> dict[str, LayerTime]:
        """Seconds of each layer, the input layer included."""
        ...

    def samples(self, loaded: LoadedModel, samples: Sequence[Any]) -> Samples:
        """What each tensor costs to send, losslessly."""
        ...

    def slices(self, loaded: LoadedModel, groups: Sequence[Sequence[str]], layer_s: Mapping[str, float]) -> Whole:
        """What slices of these layers take whole, beside the sum of their layers."""
        ...

    def codecs(self, loaded: LoadedModel, samples: Sequence[Any], labels: Sequence[int | None]) -> CodecMeasures:
        """What the lossy codecs cost, and what they do to the answers."""
        ...


@dataclass(frozen=True, slots=True)
class MeasureHere:
    """The partitioner's own measuring, one thread: as the offload server runs slices."""

    runs: int = 20

    def layers(self, loaded: LoadedModel, frames: Sequence[bytes]) -> dict[str, LayerTime]:
        """By the runtime's own profile."""
        measured = measure_layers(loaded.prepared, loaded.prepared.graph, runs=self.runs)
        if loaded.spec is not None:
            measured[INPUT_LAYER] = measure_input(loaded.spec, frames, runs=self.runs)
        return measured

    def samples(self, loaded: LoadedModel, samples: Sequence[Any]) -> Samples:
        """Raw and compressed, on the samples that are there."""
        return measure_samples(loaded.prepared, loaded.graph, spec=loaded.spec, samples=samples)

    def slices(self, loaded: LoadedModel, groups: Sequence[Sequence[str]], layer_s: Mapping[str, float]) -> Whole:
        """As the offload server would run them; slices that noise cannot run through are believed by their layers."""
        cut = cut_slices(loaded.prepared, loaded.graph, groups, loaded.spec)
        try:
            return measured_whole(cut, layer_s, runs=self.runs)
        except ModelRefused:
            return Whole()

    def codecs(self, loaded: LoadedModel, samples: Sequence[Any], labels: Sequence[int | None]) -> CodecMeasures:
        """Every lossy codec on every tensor, the rest of the model run again from what it makes of it."""
        return measure_codecs(loaded.prepared, loaded.graph, spec=loaded.spec, samples=samples, labels=labels)


class Planning:
    """Plans for the models of one registry."""

    def __init__(
        self, database: Database, registry: Registry, *, now: Callable[[], float], measure: Measure | None = None
    ) -> None:
        self._database = database
        self._registry = registry
        self._now = now
        self._measure = measure or MeasureHere()

    def profile(self, model: Model, *, device_class: str = OWN_CLASS, codecs: bool = False) -> dict[str, Any]:
        """Measure the model here, anew: layers, then the slices that plans choose whole, and codecs if asked for.

        A costs file for that device class, with what people and scripts like to see besides: `median_s` and `p95_s` of
        each layer, `slices`, `codecs`, and what the tensors' sizes are from.
        """
        loaded, profile = self._registry.load(model), device_profile(device_class)
        times = self._layers(model, anew=True)
        samples = self._samples(model, anew=True)
        enough = samples.count > 1
        lossy = _shown_codecs(samples, self._codecs(model, anew=True)) if codecs and enough else []
        costs = self.costs(model, profile.name)
        classes = dict.fromkeys([profile.name, *list_profiles()])
        chosen = dict.fromkeys(cut for name in classes for cut in self._cuts(model, name))
        whole = self._measure.slices(loaded, atoms(loaded.graph, list(chosen)), _medians(times))
        costs = costs if whole.factor is None else corrected(costs, HERE, whole.factor)
        told: dict[str, Any] = msgspec.to_builtins(costs)
        told["layers"] = [{**layer, **msgspec.to_builtins(times[layer["name"]])} for layer in told["layers"]]
        return told | {
            "where": "local",
            "tensors": samples.basis,
            "slices": msgspec.to_builtins(whole.slices),
            "whole_factor": whole.factor,
            "codecs": lossy,
            "notes": [FEW_SAMPLES.format(samples.count)] if codecs and not enough else [],
        }

    def _cuts(self, model: Model, device_class: str) -> Cuts:
        """Of the table for this class: whatever the link, one of its rows is chosen."""
        return _cuts(plan(self.costs(model, device_class), {TIERS: parse_link(ASSUMED_LINK)}))

    def costs(
        self,
        model: Model,
        device_class: str,
        *,
        lossy: bool = False,
        tiers: Mapping[str, str] | None = None,
        whole: bool = False,
    ) -> Costs:
        """The model's costs on that device class and here; measures first what was not measured yet.

        The lossy codecs' costs are among them where they were measured, and with `lossy` they are measured now.
        `tiers` are further ones before this machine, by name, each with its device profile. `whole`: with this
        machine's seconds as the slices of a plan for that class take whole.
        """
        profile = device_profile(device_class)
        further = {name: device_profile(given) for name, given in (tiers or {}).items()}
        loaded = self._registry.load(model)
        times = self._layers(model)
        samples = self._samples(model)
        costs = build_costs(
            model.ref,
            loaded.graph,
            profile=profile,
            cloud_s={name: time.median_s for name, time in times.items()},
            tensors=with_codecs(samples.tensors, self._codecs(model, wanted=lossy)),
            frame_bytes=samples.frame_bytes,
            model_format=loaded.prepared.format,
        )
        if whole:
            costs = self._checked(model, costs, links_through(parse_link(ASSUMED_LINK)), Wish())
        for name, beyond in further.items():
            costs = with_tier(costs, loaded.graph, name, beyond, loaded.prepared.format)
        return costs

    def plan(
        self,
        model: Model,
        device_class: str,
        link: Link,
        wish: Wish,
        through: Through | None = None,
        measured: Measured | None = None,
    ) -> Plan:
        """The plan of one model for one device class and its first link: to this machine, or to the gateway. A server
        that is not ours is reached directly. `measured`: what devices of the class measured at work counts in place of
        what was predicted."""
        through = None if wish.server else through
        tiers = {EDGE: through.device_class} if through else {}
        links = links_through(link, through)
        costs = self.costs(model, device_class, lossy=wish.lossy, tiers=tiers)
        costs, wish = self._asked(model, costs, links, wish, measured)
        return plan(costs, links, objective=wish.objective, limits=wish.planner_limits(), codecs=wish.codecs)

    def _asked(
        self, model: Model, costs: Costs, links: Mapping[str, Link], wish: Wish, measured: Measured | None = None
    ) -> tuple[Costs, Wish]:
        """The costs that the wish is planned with, and the wish as the server that finishes leaves it possible."""
        if wish.server is not None:
            check_servable(model.ref, self._registry.load(model).prepared.format)
            costs = foreign_costs(costs, wish.server)
            limits = possible(wish.planner_limits(), costs)
            wish = msgspec.structs.replace(wish, partition="auto", limits=limits)
        costs = as_measured(costs, measured) if measured else costs
        if measured is not None and measured.remote:
            check_first(costs, as_limits(wish.planner_limits()))
            return costs, wish  # measured at work is measured whole
        return self._checked(model, costs, links, wish), wish

    def describe(self, model: Model, device_class: str, link_text: str, wish: Wish) -> dict[str, Any]:
        """The same for people: candidates, ranges, certificate."""
        link = parse_link(link_text or ASSUMED_LINK)
        costs, wish = self._asked(model, self.costs(model, device_class, lossy=wish.lossy), links_through(link), wish)
        return describe(costs, link, objective=wish.objective, limits=wish.planner_limits(), codecs=wish.codecs)

    def _checked(self, model: Model, costs: Costs, links: Mapping[str, Link], wish: Wish) -> Costs:
        """The costs with this machine's seconds as the slices of the plan take whole; where that changes the plan,
        those of the new plan count."""
        check_first(costs, as_limits(wish.planner_limits()))

        def cuts_of(one: Costs) -> Cuts:
            return _cuts(plan(one, links, objective=wish.objective, limits=wish.planner_limits(), codecs=wish.codecs))

        return believed(costs, HERE, cuts_of, lambda cuts: self._whole_factor(model, cuts))

    def _whole_factor(self, model: Model, cuts: Cuts) -> float | None:
        """One factor for the slices of this table, measured once; None where they cannot be compared."""
        loaded, times = self._registry.load(model), self._layers(model)
        groups = atoms(loaded.graph, cuts)
        key = sha256(msgspec.json.encode(groups)).hexdigest()
        kept = dict((self._kept(model, "slices") or {}).get("factors", {}))
        if key not in kept:
            kept[key] = self._measure.slices(loaded, groups, _medians(times)).factor
            self._keep(model, "slices", {"factors": dict(list(kept.items())[-MOST_TABLES:])})
        factor: float | None = kept[key]
        return factor

    def _layers(self, model: Model, *, anew: bool = False) -> dict[str, LayerTime]:
        kept = None if anew else self._kept(model, "layers")
        if kept is not None:
            return msgspec.convert(kept["layers"], dict[str, LayerTime])
        samples = self._registry.samples(model, MEASURED_SAMPLES)
        frames = [sample for sample in samples if isinstance(sample, bytes)]
        times = self._measure.layers(self._registry.load(model), frames)
        self._keep(model, "layers", {"layers": msgspec.to_builtins(times)})
        self._keep(model, "slices", {"factors": {}})
        return times

    def _samples(self, model: Model, *, anew: bool = False) -> Samples:
        """Measured again when samples came since."""
        count = len(self._registry.samples(model, MEASURED_SAMPLES))
        kept = None if anew else self._kept(model, "tensors")
        if kept is not None and kept["samples"]["count"] == count:
            return msgspec.convert(kept["samples"], Samples)
        found = self._measure.samples(self._registry.load(model), self._registry.samples(model, MEASURED_SAMPLES))
        self._keep(model, "tensors", {"samples": msgspec.to_builtins(found)})
        return found

    def _codecs(self, model: Model, *, wanted: bool = True, anew: bool = False) -> CodecMeasures:
        """Measured again when samples or labels came since; nothing where it is not wanted and not there."""
        count = len(self._registry.samples(model, MEASURED_SAMPLES))
        labels = self._registry.labels(model, MEASURED_SAMPLES)
        kept = None if anew else self._kept(model, "codecs")
        if kept is not None and kept["labels"] == labels:
            return msgspec.convert(kept["codecs"], CodecMeasures)
        if not wanted:
            return CodecMeasures()
        if count < 2:
            raise UsageError(f"{model.ref}: {FEW_SAMPLES.format(count)}; add some by `edgectl profile --samples`")
        samples = self._registry.samples(model, MEASURED_SAMPLES)
        found = self._measure.codecs(self._registry.load(model), samples, labels)
        self._keep(model, "codecs", {"codecs": msgspec.to_builtins(found), "labels": labels})
        return found

    def _kept(self, model: Model, kind: str) -> Mapping[str, Any] | None:
        with self._database.read() as session:
            found = select(Measurement).where(Measurement.model_id == model.id, Measurement.kind == kind)
            row = session.scalars(found.where(Measurement.place == HERE)).first()
            return row.content if row is not None else None

    def _keep(self, model: Model, kind: str, content: dict[str, Any]) -> None:
        with self._database.write() as session:
            found = select(Measurement).where(Measurement.model_id == model.id, Measurement.kind == kind)
            row = session.scalars(found.where(Measurement.place == HERE)).first()
            if row is None:
                row = Measurement(model_id=model.id, kind=kind, place=HERE)
                session.add(row)
            row.content, row.taken = content, self._now()


def _cuts(made: Plan) -> Cuts:
    return cut_sets(made.table)


def _medians(times: Mapping[str, LayerTime]) -> dict[str, float]:
    return {name: time.median_s for name, time in times.items()}


def _shown_codecs(samples: Samples, measured: CodecMeasures) -> list[dict[str, Any]]:
    """Every lossy codec on every tensor, for people and scripts."""
    rows = []
    for tensor, by_codec in measured.tensors.items():
        for codec, one in by_codec.items():
            figures = {
                "bytes": one.cost.bytes,
                "zstd_bytes": one.packed.bytes,
                "encode_s": one.packed.encode_s[HERE],
                "decode_s": one.packed.decode_s[HERE],
                "loss": one.chosen.loss,
                "confirmed_loss": one.confirmed.loss,
                "accuracy": one.confirmed.accuracy,
                "accuracy_raw": one.confirmed.accuracy_raw,
            }
            rows.append({"tensor": tensor, "codec": codec, "raw_bytes": samples.tensors[tensor].bytes, **figures})
    return rows


def device_profile(name: str) -> DeviceProfile:
    """The shipped profile of that name: a path, which would be one on the controller's machine, is no name."""
    if name not in list_profiles():
        raise unknown("device profile", name, list_profiles())
    return load_profile(name)


def links_through(link: Link, through: Through | None = None) -> dict[str, Link]:
    """The links of a plan, by the tiers that they join."""
    if through is None:
        return {TIERS: link}
    return {f"device-{EDGE}": link, f"{EDGE}-{HERE}": through.uplink}


def link_of(*texts: str) -> Link:
    """The link that the first text spells that is not empty."""
    return parse_link(next((text for text in texts if text), ASSUMED_LINK))


def slowest(links: Sequence[Link]) -> Link:
    """The link that a plan for several devices is asked for; its table holds rows for all the others too."""
    return min(links, key=lambda link: (link.up_bytes_per_s, -link.rtt_s))
