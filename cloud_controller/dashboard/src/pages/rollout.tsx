// One rollout: how far each stage is, what it waits for, who failed and why, and what an operator may ask of it.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import { clock, useCell } from "../data/cell";
import { useResource } from "../data/resource";
import { consequences, VERBS, type Verb, verbsFor } from "../data/rollout";
import { may } from "../data/session";
import type { Rollout, RolloutDevice } from "../data/types";
import { age, count, moment, NONE, short } from "../format";
import { Confirm } from "../parts/confirm";
import { Loading, Panel, Problem } from "../parts/notes";
import { Progress } from "../parts/progress";
import { Spelt } from "../parts/spelt";
import { Status } from "../parts/status";
import { to } from "../route";

const MOST_SHOWN = 500;

export function RolloutPage({ id }: { id: string }) {
  const path = `/v1/rollouts/${encodeURIComponent(id)}`;
  const { data, error, again } = useResource<Rollout>(
    path,
    (change) => change.kind === "rollout" && change.subject === id,
  );
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  return (
    <>
      <Head rollout={data} again={again} />
      {error && <Problem error={error} again={again} />}
      {data.why !== "" && <p class="words">{data.why}</p>}
      {data.waits_for !== "" && (
        <p class="words">
          Waits for{" "}
          <b>
            <Spelt text={data.waits_for} />
          </b>
        </p>
      )}
      <Facts rollout={data} />
      <Stages rollout={data} />
      <div class="panels two">
        <Failures rollout={data} />
        <Terms rollout={data} />
      </div>
      <Devices rollout={data} path={path} />
    </>
  );
}

function Head({ rollout, again }: { rollout: Rollout; again: () => void }) {
  const [asking, setAsking] = useState<Verb | null>(null);
  return (
    <div class="head">
      <h1>Rollout {rollout.id}</h1>
      <Status state={rollout.state} />
      <span>
        <a href={to("models", rollout.model)}>{rollout.model}</a> <code>{short(rollout.release)}</code>
      </span>
      {may("operator") ? (
        <div class="actions">
          {verbsFor(rollout).map((verb) => (
            <button
              key={verb}
              type="button"
              class={verb === "approve" ? "primary" : ""}
              onClick={() => setAsking(verb)}
            >
              {VERBS[verb].title}
            </button>
          ))}
        </div>
      ) : (
        <span class="actions faint">As a viewer you may watch; operators approve and stop.</span>
      )}
      {asking !== null && (
        <Confirm
          title={`${VERBS[asking].title}: rollout ${rollout.id}?`}
          act={VERBS[asking].title}
          danger={VERBS[asking].danger}
          onAct={async () => {
            await post(`/v1/rollouts/${rollout.id}/${asking}`);
            again();
          }}
          onClose={() => setAsking(null)}
        >
          {consequences(rollout, asking).map((one) => (
            <p key={one}>{one}</p>
          ))}
        </Confirm>
      )}
    </div>
  );
}

function Facts({ rollout }: { rollout: Rollout }) {
  const now = useCell(clock);
  const facts: [string, string][] = [
    ["devices", count(rollout.devices)],
    ["to", rollout.targets.join(", ")],
    ["by", rollout.who],
    ["made", moment(rollout.created)],
    ["began", rollout.began ? `${age(rollout.began, now)} ago` : "not yet"],
  ];
  if (rollout.ended) facts.push(["ended", moment(rollout.ended)]);
  if (rollout.superseded_by) facts.push(["superseded by", `rollout ${rollout.superseded_by}`]);
  if (rollout.following) facts.push(["follows", "devices that come to be meant"]);
  return (
    <dl class="figures">
      {facts.map(([name, fact]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{fact}</dd>
        </div>
      ))}
    </dl>
  );
}

function Stages({ rollout }: { rollout: Rollout }) {
  return (
    <Panel title="Stages">
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Stage</th>
              <th scope="col">Asked</th>
              <th scope="col" class="wide">
                Devices
              </th>
              <th scope="col" class="number">
                Failures
              </th>
              <th scope="col">Began</th>
            </tr>
          </thead>
          <tbody>
            {rollout.stages.map((stage) => (
              <tr key={stage.number} class={stage.number === rollout.stage ? "best" : ""}>
                <th scope="row">
                  {stage.number}
                  {stage.needs_approval && <span class="mark plain">needs approval</span>}
                </th>
                <td>{stage.asked}</td>
                <td class="wide">
                  <Progress states={stage.states} />
                </td>
                <td class={`number${stage.failures > 0 ? " bad" : ""}`}>{count(stage.failures)}</td>
                <td class="nowrap">{moment(stage.began)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Failures({ rollout }: { rollout: Rollout }) {
  return (
    <Panel title="Failures by cause">
      {rollout.failures.length === 0 ? (
        <p class="none">None.</p>
      ) : (
        <table>
          <tbody>
            {rollout.failures.map((one) => (
              <tr key={one.kind}>
                <td class="number bad">{count(one.count)}</td>
                <th scope="row">
                  {one.kind}
                  <div class="faint">
                    {one.example} ·{" "}
                    {one.devices.map((name, place) => [
                      place > 0 && ", ",
                      <a key={name} href={to("devices", name)}>
                        {name}
                      </a>,
                    ])}
                    {one.count > one.devices.length && ", …"}
                  </div>
                </th>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Panel>
  );
}

function Terms({ rollout }: { rollout: Rollout }) {
  const told = Object.entries(rollout.terms).filter(([, term]) => !isEmpty(term));
  return (
    <Panel title="Terms">
      <table>
        <tbody>
          {told.map(([name, term]) => (
            <tr key={name}>
              <th scope="row">{name.replaceAll("_", " ")}</th>
              <td>{name === "starts_at" ? moment(term as number) : spelt(term)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Panel>
  );
}

function isEmpty(term: unknown): boolean {
  return term === null || term === "" || term === false || (Array.isArray(term) && term.length === 0);
}

function spelt(term: unknown): string {
  return Array.isArray(term) ? term.join(", then ") : term === true ? "yes" : String(term);
}

function Devices({ rollout, path }: { rollout: Rollout; path: string }) {
  const [state, setState] = useState("");
  const asked = `${path}/devices?most=${MOST_SHOWN}${state === "" ? "" : `&state=${encodeURIComponent(state)}`}`;
  const own = (change: { kind: string; subject: string }) =>
    change.kind === "rollout" && change.subject === String(rollout.id);
  const { data, error, again } = useResource<RolloutDevice[]>(asked, own);
  const states = Object.entries(rollout.states).filter(([, many]) => many > 0);
  return (
    <Panel
      title="Devices"
      note={
        data !== null && data.length >= MOST_SHOWN ? `the first ${MOST_SHOWN}; edgectl rollout status shows more` : ""
      }
    >
      <fieldset class="states">
        <legend class="hidden">Only devices of one state</legend>
        {states.map(([name, many]) => (
          <button
            key={name}
            type="button"
            aria-pressed={state === name}
            onClick={() => setState(state === name ? "" : name)}
          >
            <b>{count(many)}</b> <Status state={name} />
          </button>
        ))}
      </fieldset>
      {error && <Problem error={error} again={again} />}
      {data === null ? (
        <Loading />
      ) : (
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">Device</th>
                <th scope="col">Stage</th>
                <th scope="col">State</th>
                <th scope="col">Told</th>
                <th scope="col">Before</th>
                <th scope="col">Why</th>
              </tr>
            </thead>
            <tbody>
              {data.map((one) => (
                <tr key={one.device}>
                  <th scope="row">
                    <a href={to("devices", one.device)}>{one.device}</a>
                  </th>
                  <td>{one.stage}</td>
                  <td>
                    <Status state={one.state} />
                  </td>
                  <td class="nowrap">{moment(one.told_at)}</td>
                  <td>
                    <code>{one.previous === null ? NONE : short(one.previous)}</code>
                  </td>
                  <td class="faint detail">
                    {one.cause}
                    {one.goes_back && " · was told to go back"}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
