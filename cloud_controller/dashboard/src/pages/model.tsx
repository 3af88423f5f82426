// One model: what each device class does with it by its newest releases, and what splitting gains there.

import { useState } from "preact/hooks";
import { useResource } from "../data/resource";
import type { Curves, ModelView, ReleaseView } from "../data/types";
import { bytes, count, moment, plural, short } from "../format";
import { CurveChart, Gain, inWords, PlanTable } from "../parts/curves";
import { Empty, Loading, Panel, Problem } from "../parts/notes";

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
          <Releases releases={data.releases} shown={release} onChoose={setChosen} />
          {release.plans.map((plan) => (
            <PlanPanel key={`${release.release} ${plan.device_class}`} model={data.model} plan={plan} />
          ))}
        </>
      )}
    </>
  );
}

function Facts({ model }: { model: ModelView }) {
  const layers = typeof model.layers === "number" ? model.layers : model.layers.length;
  return (
    <dl class="figures">
      <div>
        <dt>layers</dt>
        <dd>{count(layers)}</dd>
      </div>
      <div>
        <dt>size</dt>
        <dd>{bytes(model.bytes)}</dd>
      </div>
      <div>
        <dt>input</dt>
        <dd>{model.input ?? "tensors"}</dd>
      </div>
      <div>
        <dt>pushed</dt>
        <dd>{moment(model.created_at)}</dd>
      </div>
      <div>
        <dt>sha256</dt>
        <dd>
          <code>{short(model.sha256)}</code>
        </dd>
      </div>
    </dl>
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
  return (
    <Panel title="Releases" note="the one chosen is shown below">
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Release</th>
              <th scope="col">Made</th>
              <th scope="col">Plans for</th>
              <th scope="col" class="number">
                Slices
              </th>
              <th scope="col" class="number">
                Size
              </th>
              <th scope="col" class="number">
                Wanted by
              </th>
              <th scope="col">Kind</th>
            </tr>
          </thead>
          <tbody>
            {releases.map((one) => (
              <tr key={one.release} class={one === shown ? "best" : ""}>
                <th scope="row">
                  <button
                    type="button"
                    class="plain"
                    aria-pressed={one === shown}
                    onClick={() => onChoose(one.release)}
                  >
                    <code>{short(one.release)}</code>
                  </button>
                </th>
                <td class="nowrap">{moment(one.created)}</td>
                <td>{one.plans.map((plan) => plan.device_class).join(", ")}</td>
                <td class="number">{one.slices}</td>
                <td class="number">{bytes(one.bytes)}</td>
                <td class="number">{plural(one.devices, "device")}</td>
                <td class="faint">
                  {[one.recut_of === "" ? "" : `re-cut of ${short(one.recut_of)}`, one.encrypted ? "encrypted" : ""]
                    .filter(Boolean)
                    .join(", ")}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function PlanPanel({ model, plan }: { model: string; plan: Curves }) {
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
      <Picture model={model} plan={plan} />
    </Panel>
  );
}

/** Drawn by the controller, which may have to plan for it: only when asked for. */
function Picture({ model, plan }: { model: string; plan: Curves }) {
  const [open, setOpen] = useState(false);
  const asked = new URLSearchParams({ device: plan.device_class, link: spelt(plan) });
  const address = `/v1/models/${encodeURIComponent(model)}/picture.svg?${asked}`;
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Every candidate, as edgectl plan --plot draws it</summary>
      {open && (
        <a class="picture" href={address}>
          <img src={address} alt={`Candidates of ${model} on ${plan.device_class}, and the best cut over bandwidth`} />
        </a>
      )}
    </details>
  );
}

function spelt(plan: Curves): string {
  const { up_bytes_per_s, rtt_s } = plan.link;
  return `${+(up_bytes_per_s * 8e-6).toPrecision(6)}mbit/${+(rtt_s * 1000).toPrecision(6)}ms`;
}
