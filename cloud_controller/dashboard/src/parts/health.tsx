// Health of the installation's components: a strip of states, and details of those that are not good.

import { useResource } from "../data/resource";
import type { Component } from "../data/types";
import { moment } from "../format";
import { to } from "../route";
import { CommandText } from "./command_text";
import { Panel, Problem } from "./notes";
import { Status } from "./status";
import { type Column, Table } from "./table";

const EVERY_S = 10;

export function useComponents() {
  return useResource<Component[]>("/v1/components", () => false, EVERY_S);
}

/** For the overview: the state of every component, and remedies for those that are not good. */
export function ComponentStrip() {
  const { data, error, again } = useComponents();
  const bad = (data ?? []).filter((component) => component.state !== "good");
  return (
    <Panel title="Components" note={<a href={to("system")}>more</a>}>
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
          {bad.map((component) => (
            <li key={component.name + component.subject}>
              <b>{titleOf(component)}</b>: <CommandText text={component.text} />
              <div class="faint">
                <CommandText text={component.remedy} />
              </div>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

export function ComponentTable() {
  const { data, error, again } = useComponents();
  return (
    <Panel title="Components" note="as the controller sees them">
      {error && <Problem error={error} again={again} />}
      {data !== null && <Table columns={COLUMNS} rows={data} id={titleOf} />}
    </Panel>
  );
}

const COLUMNS: readonly Column<Component>[] = [
  { title: "Component", heads: true, cell: (component) => <Named component={component} /> },
  { title: "State", cell: (component) => <Status state={component.state} /> },
  {
    title: "Detail",
    kind: "detail",
    cell: (component) => (
      <>
        <CommandText text={component.text} />
        {component.remedy !== "" && (
          <div class="faint">
            <CommandText text={component.remedy} />
          </div>
        )}
      </>
    ),
  },
  { title: "Since", kind: "nowrap", cell: (component) => moment(component.since) },
  { title: "Checked", kind: "nowrap", cell: (component) => moment(component.at) },
];

function Named({ component }: { component: Component }) {
  return (
    <>
      {component.name} {component.subject !== "" && <a href={to("devices", component.subject)}>{component.subject}</a>}
    </>
  );
}

function titleOf(component: Component): string {
  return component.subject === "" ? component.name : `${component.name} ${component.subject}`;
}

/** One state per name: of several gateways the worst, which the response lists first. */
function byName(components: readonly Component[]): [string, string][] {
  const states = new Map<string, string>();
  for (const component of components) if (!states.has(component.name)) states.set(component.name, component.state);
  return [...states].sort(([a], [b]) => (a < b ? -1 : 1));
}
