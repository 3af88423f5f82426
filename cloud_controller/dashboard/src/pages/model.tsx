// One model: its releases with the plan for each device class, what splitting gains, and measurements of all devices.

import { useState } from "preact/hooks";
import { clock } from "../data/cell";
import { firstRange, fromBuckets, origins, type Range } from "../data/history";
import { useResource } from "../data/resource";
import { may } from "../data/session";
import type { Accuracy, Curves, FamilyVariant, ModelHistory, ModelView, ReleaseView, Variant } from "../data/types";
import { bytes, count, moment, percent, plural, short } from "../format";
import { AuditFigures } from "../parts/audits";
import { CurveChart, Gain, inWords, PlanTable } from "../parts/curves";
import { DeployButton } from "../parts/deploy";
import { Figures } from "../parts/figures";
import {
  CascadeAuditsChart,
  CascadeChart,
  EnergyChart,
  LatencyChart,
  Ranges,
  RequestsChart,
  StillAuditsChart,
} from "../parts/history_charts";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
import { Proposals } from "../parts/proposals";
import { OriginCounts } from "../parts/status";
import { type Column, Table } from "../parts/table";
import { UndeployButton } from "../parts/undeploy";
import { to } from "../route";
import { layersOf } from "./models";

export function ModelPage({ reference }: { reference: string }) {
  const path = `/v1/views/models/${encodeURIComponent(reference)}`;
  const { data, error, again } = useResource<ModelView>(
    path,
    (change) => change.kind !== "device" && change.kind !== "alert",
  );
  const [chosen, setChosen] = useState("");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  const release = data.releases.find((release) => release.release === chosen) ?? data.releases[0];
  return (
    <>
      <div class="head">
        <h1>{data.model}</h1>
        {may("operator") && (
          <div class="actions">
            <DeployButton model={data.model} />
            {data.releases.length > 0 && <UndeployButton model={data.model} />}
          </div>
        )}
      </div>
      {error && <Problem error={error} again={again} />}
      <Facts model={data} />
      <Lineage model={data} />
      {data.family !== null && <Family variants={data.family} />}
      {release === undefined ? (
        <Empty
          command={`edgectl plan ${data.model} --device raspberrypi4 --link lte\nedgectl deploy ${data.model} --to all`}
        >
          This model has no release yet. Show its plan, or deploy it:
        </Empty>
      ) : (
        <>
          <Measured model={data.model} since={Math.min(...data.releases.map((each) => each.created))} />
          <Proposals model={data.model} />
          <Releases releases={data.releases} shown={release} onChoose={setChosen} />
          <ChangedAnswers release={release} />
          {release.plans.map((plan) => (
            <PlanPanel key={`${release.release} ${plan.device_class}`} plan={plan} />
          ))}
        </>
      )}
    </>
  );
}

function Facts({ model }: { model: ModelView }) {
  const shape: [string, string][] =
    model.family === null
      ? [
          ["layers", count(layersOf(model))],
          ["size", bytes(model.bytes)],
          ["input", model.input ?? "tensors"],
        ]
      : [["variants", count(model.family.length)]];
  return (
    <Figures
      facts={[
        ...shape,
        ["pushed", moment(model.created_at)],
        ["sha256", <code key="sha256">{short(model.sha256)}</code>],
      ]}
    />
  );
}

/** Where a version comes from, and how the versions compare that stand in for the same one. */
function Lineage({ model }: { model: ModelView }) {
  const { lineage, variants } = model;
  if (lineage === undefined && variants.length === 0) return null;
  const columns: readonly Column<Variant>[] = [
    { title: "Version", heads: true, cell: ({ model }) => <a href={to("models", model)}>{model}</a> },
    { title: "Made by", cell: ({ method }) => method },
    { title: "Size", kind: "number", cell: ({ bytes: size }) => bytes(size) },
    { title: "Accuracy", kind: "number", cell: ({ accuracy }) => accuracyText(accuracy) },
    { title: "Of the base", kind: "number", cell: ({ accuracy_base }) => accuracyText(accuracy_base) },
    {
      title: "Answers that differ",
      kind: "number",
      cell: ({ changed_at_most, samples }) => `at most ${percent(changed_at_most, 1)} (${count(samples)} samples)`,
    },
  ];
  return (
    <Panel title="Versions of one model" note={`base: ${lineage?.base ?? model.model}`}>
      {lineage?.sentences.map((sentence) => (
        <p key={sentence} class="words">
          {sentence}
        </p>
      ))}
      <Table
        name="cards"
        columns={columns}
        rows={variants}
        id={(variant) => variant.model}
        marked={(variant) => variant.model === model.model}
      />
    </Panel>
  );
}

/** The models among which a family's devices choose, the most accurate first. */
function Family({ variants }: { variants: readonly FamilyVariant[] }) {
  const reference = variants[0]?.reference ?? "";
  const measured = reference === "" ? "Accuracy" : `Agreement with ${reference}`;
  const columns: readonly Column<FamilyVariant>[] = [
    { title: "Variant", heads: true, cell: ({ name }) => name },
    { title: "Model", cell: ({ model }) => <a href={to("models", model)}>{model}</a> },
    { title: `${measured} (90 % sure)`, kind: "number", cell: ({ accuracy }) => accuracyText(accuracy) },
    { title: "Samples", kind: "number", cell: ({ samples }) => count(samples) },
  ];
  const sorted = [...variants].sort((a, b) => b.accuracy.share - a.accuracy.share);
  return (
    <Panel
      title="Variants"
      note={reference === "" ? "one answers each request" : "one answers each request; samples without labels"}
    >
      <Table name="cards" columns={columns} rows={sorted} id={({ name }) => name} />
    </Panel>
  );
}

/** What the release's cascades promise, and what its devices measured. */
function ChangedAnswers({ release }: { release: ReleaseView }) {
  const { cascades, audits } = release;
  if (cascades.length === 0 && audits === null) return null;
  return (
    <Panel
      title="Answers that may change"
      note={audits === null ? "not measured yet" : `measured on ${plural(audits.audited_devices, "device")}`}
    >
      {cascades.map((cascade) => (
        <p key={cascade.device_class} class="words">
          On {cascade.device_class} {cascade.first} answers where its {cascade.score} is at least{" "}
          {Number(cascade.threshold.toPrecision(4))}, else {cascade.second} is asked: {percent(cascade.escalated, 1)} of
          the samples. Promised: {cascade.promise}.
        </p>
      ))}
      {audits !== null && <AuditFigures audits={audits} />}
    </Panel>
  );
}

function accuracyText(accuracy: Accuracy | null): string {
  if (accuracy === null) return "unknown";
  const { share, at_least, at_most } = accuracy;
  return `${percent(share, 1)} (${percent(at_least, 1)} to ${percent(at_most, 1)})`;
}

function Releases({
  releases,
  shown,
  onChoose,
}: {
  releases: ReleaseView[];
  shown: ReleaseView;
  onChoose: (release: string) => void;
}) {
  const columns: readonly Column<ReleaseView>[] = [
    {
      title: "Release",
      heads: true,
      cell: (release) => (
        <button type="button" class="plain" aria-pressed={release === shown} onClick={() => onChoose(release.release)}>
          <code>{short(release.release)}</code>
        </button>
      ),
    },
    { title: "Created", kind: "nowrap", cell: (release) => moment(release.created) },
    { title: "Plans for", cell: (release) => release.plans.map((plan) => plan.device_class).join(", ") },
    { title: "Slices", kind: "number", cell: (release) => release.slices },
    { title: "Size", kind: "number", cell: (release) => bytes(release.bytes) },
    {
      title: "Assigned to",
      kind: "number",
      cell: (release) => (
        <>
          {plural(release.devices, "device")} <OriginCounts emulated={release.emulated} simulated={release.simulated} />
        </>
      ),
    },
    { title: "Kind", kind: "faint", cell: kindOf },
  ];
  return (
    <Panel title="Releases" note="the selected one is shown below">
      <Table
        name="cards"
        columns={columns}
        rows={releases}
        id={(release) => release.release}
        marked={(release) => release === shown}
      />
    </Panel>
  );
}

function kindOf(release: ReleaseView): string {
  const parts = [release.recut_of === "" ? "" : `re-cut of ${short(release.recut_of)}`];
  return [...parts, release.encrypted ? "encrypted" : ""].filter(Boolean).join(", ");
}

/** Measurements of all devices that run it, whatever its version. */
function Measured({ model, since }: { model: string; since: number }) {
  const [range, setRange] = useState<Range>(firstRange(since, clock.value));
  const path = `/v1/models/${encodeURIComponent(model)}/history?span=${range.span}`;
  const { data, error, again } = useResource<ModelHistory>(path, () => false, 30);
  const buckets = data?.buckets ?? [];
  const history = fromBuckets(buckets);
  const mark = <OriginShares by={origins(buckets)} />;
  return (
    <section aria-label="Measured on devices">
      <Ranges chosen={range} onChoose={(chosen) => chosen !== null && setRange(chosen)} />
      {error && <Problem error={error} again={again} />}
      {history.at.length === 0 ? (
        <p class="none">{data === null ? "Loading…" : "No device reported this model in this period."}</p>
      ) : (
        <div class="panels two">
          <LatencyChart history={history} note={mark} />
          <RequestsChart history={history} note={mark} per={range.per} />
          <EnergyChart history={history} note={mark} />
          <CascadeChart history={history} note={mark} />
          <CascadeAuditsChart history={history} note={mark} />
          <StillAuditsChart history={history} note={mark} />
        </div>
      )}
    </section>
  );
}

/** The share of requests that emulated or simulated devices answered. */
function OriginShares({ by }: { by: Record<string, number> }) {
  const all = Object.values(by).reduce((sum, requests) => sum + requests, 0);
  const notReal = ["emulated", "simulated"].filter((kind) => (by[kind] ?? 0) > 0);
  if (all === 0 || notReal.length === 0) return null;
  return <span class="mark">{notReal.map((kind) => `${percent(by[kind] ?? 0, all)} ${kind}`).join(", ")}</span>;
}

function PlanPanel({ plan }: { plan: Curves }) {
  const note = (
    <>
      device times <span class={plan.basis === "predicted" ? "mark" : ""}>{plan.basis}</span>
    </>
  );
  return (
    <Panel title={plan.device_class} note={note}>
      <Gain curves={plan} />
      <div class="panels two plain">
        <PlanTable curves={plan} />
        <div>
          <CurveChart curves={plan} />
          <p class="words faint">{inWords(plan)}</p>
        </div>
      </div>
    </Panel>
  );
}
