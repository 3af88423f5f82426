// One model: what each device class does with it by its newest releases, and what splitting gains there.

import { useState } from "preact/hooks";
import { origins, RANGES, type Range, rolled } from "../data/history";
import { useResource } from "../data/resource";
import type { Curves, ModelHistory, ModelView, ReleaseView } from "../data/types";
import { bytes, count, moment, percent, plural, short } from "../format";
import { CurveChart, Gain, inWords, PlanTable } from "../parts/curves";
import { Figures } from "../parts/figures";
import { EnergyChart, LatencyChart, Ranges, RequestsChart } from "../parts/history_charts";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
import { Proposals } from "../parts/proposals";
import { MadeUp } from "../parts/status";
import { type Column, Table } from "../parts/table";
import { layersOf } from "./models";

export function ModelPage({ reference }: { reference: string }) {
  const path = `/v1/views/models/${encodeURIComponent(reference)}`;
  const { data, error, again } = useResource<ModelView>(
    path,
    (change) => change.kind !== "device" && change.kind !== "alert",
  );
  const [chosen, setChosen] = useState("");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  const release = data.releases.find((one) => one.release === chosen) ?? data.releases[0];
  return (
    <>
      <h1>{data.model}</h1>
      {error && <Problem error={error} again={again} />}
      <Facts model={data} />
      {release === undefined ? (
        <Empty
          command={`edgectl plan ${data.model} --device raspberrypi4 --link lte\nedgectl deploy ${data.model} --to all`}
        >
          This model has no release yet. See what a plan would be, or deploy it:
        </Empty>
      ) : (
        <>
          <Served model={data.model} />
          <Proposals model={data.model} />
          <Releases releases={data.releases} shown={release} onChoose={setChosen} />
          {release.plans.map((plan) => (
            <PlanPanel key={`${release.release} ${plan.device_class}`} plan={plan} />
          ))}
        </>
      )}
    </>
  );
}

function Facts({ model }: { model: ModelView }) {
  return (
    <Figures
      facts={[
        ["layers", count(layersOf(model))],
        ["size", bytes(model.bytes)],
        ["input", model.input ?? "tensors"],
        ["pushed", moment(model.created_at)],
        ["sha256", <code key="sha256">{short(model.sha256)}</code>],
      ]}
    />
  );
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
      cell: (one) => (
        <button type="button" class="plain" aria-pressed={one === shown} onClick={() => onChoose(one.release)}>
          <code>{short(one.release)}</code>
        </button>
      ),
    },
    { title: "Made", kind: "nowrap", cell: (one) => moment(one.created) },
    { title: "Plans for", cell: (one) => one.plans.map((plan) => plan.device_class).join(", ") },
    { title: "Slices", kind: "number", cell: (one) => one.slices },
    { title: "Size", kind: "number", cell: (one) => bytes(one.bytes) },
    {
      title: "Wanted by",
      kind: "number",
      cell: (one) => (
        <>
          {plural(one.devices, "device")} <MadeUp emulated={one.emulated} simulated={one.simulated} />
        </>
      ),
    },
    { title: "Kind", kind: "faint", cell: kindOf },
  ];
  return (
    <Panel title="Releases" note="the one chosen is shown below">
      <Table columns={columns} rows={releases} id={(one) => one.release} marked={(one) => one === shown} />
    </Panel>
  );
}

function kindOf(release: ReleaseView): string {
  const parts = [release.recut_of === "" ? "" : `re-cut of ${short(release.recut_of)}`];
  return [...parts, release.encrypted ? "encrypted" : ""].filter(Boolean).join(", ");
}

/** What all devices that run it made of it, whatever its version. */
function Served({ model }: { model: string }) {
  const [range, setRange] = useState<Range>(RANGES[1] as Range);
  const path = `/v1/models/${encodeURIComponent(model)}/history?span=${range.span}`;
  const { data, error, again } = useResource<ModelHistory>(path, () => false, 30);
  const buckets = data?.buckets ?? [];
  const made = rolled(buckets);
  const mark = <Answered by={origins(buckets)} />;
  return (
    <section aria-label="What devices made of it">
      <Ranges chosen={range} onChoose={(chosen) => chosen !== null && setRange(chosen)} />
      {error && <Problem error={error} again={again} />}
      {made.at.length === 0 ? (
        <p class="none">{data === null ? "Reading…" : "No device has told of it in that time."}</p>
      ) : (
        <div class="panels two">
          <LatencyChart made={made} note={mark} />
          <RequestsChart made={made} note={mark} per={range.per} />
          <EnergyChart made={made} note={mark} />
        </div>
      )}
    </section>
  );
}

/** Requests that no real device answered say so. */
function Answered({ by }: { by: Record<string, number> }) {
  const all = Object.values(by).reduce((sum, one) => sum + one, 0);
  const unreal = ["emulated", "simulated"].filter((kind) => (by[kind] ?? 0) > 0);
  if (all === 0 || unreal.length === 0) return null;
  return <span class="mark">{unreal.map((kind) => `${percent(by[kind] ?? 0, all)} ${kind}`).join(", ")}</span>;
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
