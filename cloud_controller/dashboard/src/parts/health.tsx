// How the parts of the installation are: in a line where all is well, and in words where something is not.

import { useResource } from "../data/resource";
import type { Part } from "../data/types";
import { moment } from "../format";
import { to } from "../route";
import { Panel, Problem } from "./notes";
import { Spelt } from "./spelt";
import { Status } from "./status";
import { type Column, Table } from "./table";

const EVERY_S = 10;

export function useParts() {
  return useResource<Part[]>("/v1/components", () => false, EVERY_S);
}

/** For the overview: every part's state by name, and what to do about those that are not well. */
export function PartsStrip() {
  const { data, error, again } = useParts();
  const bad = (data ?? []).filter((part) => part.state !== "good");
  return (
    <Panel title="Parts" note={<a href={to("system")}>more</a>}>
      {error && <Problem error={error} again={again} />}
      <ul class="parts-strip">
        {byName(data ?? []).map(([name, state]) => (
          <li key={name}>
            <Status state={state} label={name} />
          </li>
        ))}
      </ul>
      {bad.length > 0 && (
        <ul class="warnings">
          {bad.map((part) => (
            <li key={part.name + part.subject}>
              <b>{titleOf(part)}</b>: <Spelt text={part.text} />
              <div class="faint">
                <Spelt text={part.remedy} />
              </div>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

export function PartsTable() {
  const { data, error, again } = useParts();
  return (
    <Panel title="Parts" note="as the controller sees them">
      {error && <Problem error={error} again={again} />}
      {data !== null && <Table columns={COLUMNS} rows={data} id={titleOf} />}
    </Panel>
  );
}

const COLUMNS: readonly Column<Part>[] = [
  { title: "Part", heads: true, cell: (part) => <Named part={part} /> },
  { title: "State", cell: (part) => <Status state={part.state} /> },
  {
    title: "What is known",
    kind: "detail",
    cell: (part) => (
      <>
        <Spelt text={part.text} />
        {part.remedy !== "" && (
          <div class="faint">
            <Spelt text={part.remedy} />
          </div>
        )}
      </>
    ),
  },
  { title: "Since", kind: "nowrap", cell: (part) => moment(part.since) },
  { title: "Seen", kind: "nowrap", cell: (part) => moment(part.at) },
];

function Named({ part }: { part: Part }) {
  return (
    <>
      {part.name} {part.subject !== "" && <a href={to("devices", part.subject)}>{part.subject}</a>}
    </>
  );
}

function titleOf(part: Part): string {
  return part.subject === "" ? part.name : `${part.name} ${part.subject}`;
}

/** One state per name: of several gateways the worst, for which the answer is sorted. */
function byName(parts: readonly Part[]): [string, string][] {
  const found = new Map<string, string>();
  for (const part of parts) if (!found.has(part.name)) found.set(part.name, part.state);
  return [...found].sort(([a], [b]) => (a < b ? -1 : 1));
}
