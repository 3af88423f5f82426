// One rollout: progress of its stages, what it waits for, failures by cause, its devices, and the actions it allows.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import { clock, useCell } from "../data/cell";
import { useResource } from "../data/resource";
import { consequences, VERBS, type Verb, verbsFor } from "../data/rollout";
import { may } from "../data/session";
import type { Failure, Rollout, RolloutDevice, Stage } from "../data/types";
import { age, count, moment, NONE, short } from "../format";
import { CommandText } from "../parts/command_text";
import { Confirm } from "../parts/confirm";
import { type Fact, Figures } from "../parts/figures";
import { Loading, Panel, Problem } from "../parts/notes";
import { Progress } from "../parts/progress";
import { Origin, OriginCounts, Status } from "../parts/status";
import { type Column, Table } from "../parts/table";
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
      {data.withdraws && <p class="words">Removes the model from its devices, stage by stage.</p>}
      {data.reason !== "" && <p class="words">{data.reason}</p>}
      {data.waits_for !== "" && (
        <p class="words">
          Waits for{" "}
          <b>
            <CommandText text={data.waits_for} />
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

/** What a device ran before the rollout; the dash where it ran the same release. */
function previousText(previous: string | null): string {
  if (previous === null) return NONE;
  return previous === "nothing" ? previous : short(previous);
}

function Head({ rollout, again }: { rollout: Rollout; again: () => void }) {
  const [pendingVerb, setPendingVerb] = useState<Verb | null>(null);
  return (
    <div class="head">
      <h1>Rollout {rollout.id}</h1>
      <Status state={rollout.state} />
      <span>
        {rollout.withdraws && "Undeployment of "}
        <a href={to("models", rollout.model)}>{rollout.model}</a>
        {!rollout.withdraws && <code> {short(rollout.release)}</code>}
      </span>
      {may("operator") ? (
        <div class="actions">
          {verbsFor(rollout).map((verb) => (
            <button
              key={verb}
              type="button"
              class={verb === "approve" ? "primary" : ""}
              onClick={() => setPendingVerb(verb)}
            >
              {VERBS[verb].title}
            </button>
          ))}
        </div>
      ) : (
        <span class="actions faint">A viewer can watch a rollout; operators approve and stop it.</span>
      )}
      {pendingVerb !== null && (
        <Confirm
          title={`${VERBS[pendingVerb].title}: rollout ${rollout.id}?`}
          act={VERBS[pendingVerb].title}
          danger={VERBS[pendingVerb].danger}
          onAct={async () => {
            await post(`/v1/rollouts/${rollout.id}/${pendingVerb}`);
            again();
          }}
          onClose={() => setPendingVerb(null)}
        >
          {consequences(rollout, pendingVerb).map((line) => (
            <p key={line}>{line}</p>
          ))}
        </Confirm>
      )}
    </div>
  );
}

function Facts({ rollout }: { rollout: Rollout }) {
  const now = useCell(clock);
  const facts: Fact[] = [
    [
      "devices",
      <span key="devices">
        {count(rollout.devices)} <OriginCounts emulated={rollout.emulated} simulated={rollout.simulated} />
      </span>,
    ],
    ["targets", rollout.targets.join(", ")],
    ["created by", rollout.created_by],
    ["created", moment(rollout.created)],
    ["started", rollout.began ? `${age(rollout.began, now)} ago` : "not yet"],
  ];
  if (rollout.offline > 0) facts.push(["offline", `${count(rollout.offline)} that it waits for`]);
  if (rollout.ended) facts.push(["ended", moment(rollout.ended)]);
  if (rollout.superseded_by) facts.push(["superseded by", `rollout ${rollout.superseded_by}`]);
  if (rollout.following) facts.push(["follows", "devices that match its targets later"]);
  return <Figures facts={facts} />;
}

function Stages({ rollout }: { rollout: Rollout }) {
  return (
    <Panel title="Stages">
      <Table
        name="cards"
        columns={STAGES}
        rows={rollout.stages}
        id={(stage) => stage.number}
        marked={(stage) => stage.number === rollout.stage}
      />
    </Panel>
  );
}

const STAGES: readonly Column<Stage>[] = [
  {
    title: "Stage",
    heads: true,
    cell: (stage) => (
      <>
        {stage.number}
        {stage.needs_approval && <span class="mark plain">needs approval</span>}
      </>
    ),
  },
  { title: "Size", cell: (stage) => stage.size },
  {
    title: "Devices",
    kind: "wide",
    cell: (stage) => (
      <>
        <Progress states={stage.states} />
        <OriginCounts emulated={stage.emulated} simulated={stage.simulated} />
      </>
    ),
  },
  {
    title: "Failures",
    kind: "number",
    cell: (stage) => count(stage.failures),
    tone: (stage) => (stage.failures > 0 ? "bad" : ""),
  },
  { title: "Started", kind: "nowrap", cell: (stage) => moment(stage.began) },
];

function Failures({ rollout }: { rollout: Rollout }) {
  return (
    <Panel title="Failures by cause">
      {rollout.failures.length === 0 ? (
        <p class="none">None.</p>
      ) : (
        <Table bare columns={FAILURES} rows={rollout.failures} id={(failure) => failure.kind} />
      )}
    </Panel>
  );
}

const FAILURES: readonly Column<Failure>[] = [
  { title: "Devices", kind: "number bad", cell: (failure) => count(failure.count) },
  {
    title: "Cause",
    heads: true,
    cell: (failure) => (
      <>
        {failure.kind}
        <div class="faint">
          {failure.example} ·{" "}
          {failure.devices.map((name, place) => [
            place > 0 && ", ",
            <a key={name} href={to("devices", name)}>
              {name}
            </a>,
          ])}
          {failure.count > failure.devices.length && ", …"}
        </div>
      </>
    ),
  },
];

function Terms({ rollout }: { rollout: Rollout }) {
  const given = Object.entries(rollout.terms).filter(([, term]) => !isEmpty(term));
  return (
    <Panel title="Terms">
      <Table bare columns={TERMS} rows={given} id={([name]) => name} />
    </Panel>
  );
}

const TERMS: readonly Column<[string, unknown]>[] = [
  { title: "Term", heads: true, cell: ([name]) => name.replaceAll("_", " ") },
  {
    title: "Value",
    cell: ([name, term]) => (name === "starts_at" ? moment(term as number) : termText(term)),
  },
];

function isEmpty(term: unknown): boolean {
  return term === null || term === "" || term === false || (Array.isArray(term) && term.length === 0);
}

function termText(term: unknown): string {
  return Array.isArray(term) ? term.join(", then ") : term === true ? "yes" : String(term);
}

function Devices({ rollout, path }: { rollout: Rollout; path: string }) {
  const [state, setState] = useState("");
  const query = `${path}/devices?most=${MOST_SHOWN}${state === "" ? "" : `&state=${encodeURIComponent(state)}`}`;
  const own = (change: { kind: string; subject: string }) =>
    change.kind === "rollout" && change.subject === String(rollout.id);
  const { data, error, again } = useResource<RolloutDevice[]>(query, own);
  const states = Object.entries(rollout.states).filter(([, many]) => many > 0);
  return (
    <Panel
      title="Devices"
      note={
        data !== null && data.length >= MOST_SHOWN ? `the first ${MOST_SHOWN}; edgectl rollout status shows more` : ""
      }
    >
      <fieldset class="states">
        <legend class="hidden">Filter devices by state</legend>
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
        <Table name="cards" columns={DEVICES} rows={data} id={(device) => device.device} />
      )}
    </Panel>
  );
}

const DEVICES: readonly Column<RolloutDevice>[] = [
  {
    title: "Device",
    heads: true,
    cell: (device) => (
      <>
        <a href={to("devices", device.device)}>{device.device}</a>{" "}
        <Origin emulated={device.emulated} simulated={device.simulated} />
      </>
    ),
  },
  { title: "Stage", cell: (device) => device.stage },
  { title: "State", cell: (device) => <Status state={device.state} /> },
  {
    title: "Connection",
    kind: "nowrap",
    cell: (device) => (
      <>
        <Status state={device.online ? "online" : "offline"} />
        {!device.online && <div class="faint">last seen {moment(device.last_seen)}</div>}
      </>
    ),
  },
  { title: "Assigned", kind: "nowrap", cell: (device) => moment(device.assigned_at) },
  {
    title: "Previous release",
    cell: (device) => <code>{previousText(device.previous)}</code>,
  },
  {
    title: "Cause",
    kind: "faint detail",
    cell: (device) => (device.rolls_back ? `${device.cause} · assigned the previous release again` : device.cause),
  },
];
