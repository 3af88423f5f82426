// The fleet on one page: its states, releases, cuts and problems, and every device.

import { useMemo, useState } from "preact/hooks";
import { clock, useCell } from "../data/cell";
import { has, narrowed, toggled } from "../data/filter";
import { readFleetAgain, useFleet } from "../data/fleet";
import { may } from "../data/session";
import {
  byCause,
  byCut,
  byRelease,
  byState,
  type Column as Key,
  STATES,
  sorted,
  type Tally,
  traffic,
} from "../data/summary";
import type { FleetRow } from "../data/types";
import { age, count, NONE, percent, plural, seconds, short } from "../format";
import { ClaimButton } from "../parts/claim";
import { ComponentStrip } from "../parts/health";
import { Empty, Loading, Panel, Problem } from "../parts/notes";
import { Origin, Status } from "../parts/status";
import { Trends } from "../parts/trends";
import { type Column, VirtualTable } from "../parts/virtual";
import { replaceQuery, route, to } from "../route";

const CLAIM =
  "edgectl device claim cam-1 --profile raspberrypi4 --out cam-1.claim\nedgesplit-agent run --data FOLDER --claim cam-1.claim";
const MOST_SHOWN = 6;

export function FleetPage() {
  const fleet = useFleet();
  const { query } = useCell(route);
  const filter = query.get("q") ?? "";
  const [sort, setSort] = useState<{ column: Key; downwards: boolean }>({ column: "name", downwards: false });
  const narrow = (next: string) => replaceQuery({ q: next });
  const chosen = useMemo(() => narrowed(fleet.rows, filter), [fleet.rows, filter]);
  const ordered = useMemo(() => sorted(chosen, sort.column, sort.downwards), [chosen, sort]);

  if (!fleet.loaded) return fleet.error ? <Problem error={fleet.error} again={readFleetAgain} /> : <Loading />;
  if (fleet.rows.length === 0)
    return (
      <>
        <Empty command={CLAIM}>No device has enrolled yet. Claim one, and start its agent:</Empty>
        {may("operator") && (
          <div class="actions middle">
            <ClaimButton />
          </div>
        )}
      </>
    );
  const choose = (column: Key) =>
    setSort({ column, downwards: sort.column === column ? !sort.downwards : column !== "name" });
  return (
    <>
      <h1 class="hidden">Fleet</h1>
      {fleet.error && <Problem error={fleet.error} again={readFleetAgain} />}
      <States rows={fleet.rows} filter={filter} onFilter={narrow} />
      <div class="panels three">
        <Releases rows={fleet.rows} names={fleet.releases} filter={filter} onFilter={narrow} />
        <Cuts rows={fleet.rows} filter={filter} onFilter={narrow} />
        <Problems rows={fleet.rows} filter={filter} onFilter={narrow} />
      </div>
      <Trends />
      <ComponentStrip />
      <section aria-label="Devices">
        <div class="above">
          <Search filter={filter} onFilter={narrow} shown={chosen.length} all={fleet.rows.length} />
          {may("operator") && <ClaimButton />}
        </div>
        <p class="note">p95, fallbacks and failed are those of each device's newest report.</p>
        {chosen.length === 0 ? (
          <Empty>No device matches. Remove a word from the filter.</Empty>
        ) : (
          <VirtualTable
            label="Devices"
            rows={ordered}
            columns={COLUMNS}
            name={(row) => row.name}
            href={(row) => to("devices", row.name)}
            sort={sort}
            onSort={choose}
            template="5.5rem minmax(9rem, 1.5fr) minmax(4rem, 0.6fr) minmax(11.5rem, 1.1fr) minmax(9rem, 1.2fr) minmax(6rem, 1.7fr) 4.5rem 4.5rem 3.5rem 3.5rem"
          />
        )}
      </section>
    </>
  );
}

interface Part {
  rows: readonly FleetRow[];
  filter: string;
  onFilter: (next: string) => void;
}

function States({ rows, filter, onFilter }: Part) {
  const counts = byState(rows);
  const totals = traffic(rows);
  const notReal = rows.filter((row) => row.emulated || row.simulated).length;
  return (
    <div class="strip">
      <fieldset class="states">
        <legend class="hidden">Devices by state</legend>
        {STATES.filter((state) => counts[state] > 0 || state === "online").map((state) => (
          <button
            key={state}
            type="button"
            aria-pressed={has(filter, "state", state)}
            onClick={() => onFilter(toggled(filter, "state", state))}
          >
            <b>{count(counts[state])}</b> <Status state={state} />
          </button>
        ))}
        {notReal > 0 && (
          <button
            type="button"
            class="unreal"
            aria-pressed={has(filter, "is", "emulated")}
            onClick={() => onFilter(toggled(filter, "is", originOf(rows)))}
          >
            <b>{count(notReal)}</b> <span class="mark">{originOf(rows)}</span>
          </button>
        )}
      </fieldset>
      <dl class="figures" title={`Over the newest reports of ${plural(totals.reporting, "device")} with requests`}>
        <div>
          <dt>median p95, newest reports</dt>
          <dd>{seconds(totals.medianP95)}</dd>
        </div>
        <div>
          <dt>requests per report</dt>
          <dd>{count(totals.requests)}</dd>
        </div>
        <div>
          <dt>fallbacks</dt>
          <dd>{percent(totals.fallbacks, totals.requests)}</dd>
        </div>
        <div>
          <dt>failed</dt>
          <dd>{percent(totals.failed, totals.requests)}</dd>
        </div>
      </dl>
    </div>
  );
}

function originOf(rows: readonly FleetRow[]): string {
  return rows.some((row) => row.simulated) ? "simulated" : "emulated";
}

function Releases({ rows, names, filter, onFilter }: Part & { names: Record<string, string> }) {
  const releases = byRelease(rows);
  const most = Math.max(1, ...releases.map((release) => release.running + release.coming));
  return (
    <Panel title="Releases" note="devices now">
      {releases.length === 0 ? (
        <Empty command="edgectl deploy MODEL --to all">No release is deployed.</Empty>
      ) : (
        <ul class="bars">
          {releases.slice(0, MOST_SHOWN).map((release) => (
            <li key={release.model + release.release}>
              <button
                type="button"
                aria-pressed={has(filter, "release", release.release)}
                onClick={() => onFilter(toggled(filter, "release", release.release))}
              >
                <span class="what">
                  {names[release.release] ?? release.model} <code>{short(release.release)}</code>
                </span>
                <span class="many">
                  {count(release.running)}
                  {release.coming > 0 && <span class="faint"> +{count(release.coming)} pending</span>}
                </span>
                <Bar share={release.running / most} further={release.coming / most} />
              </button>
            </li>
          ))}
          <More many={releases.length - MOST_SHOWN} />
        </ul>
      )}
    </Panel>
  );
}

function More({ many }: { many: number }) {
  return many > 0 ? <li class="faint">and {count(many)} more</li> : null;
}

function Cuts({ rows, filter, onFilter }: Part) {
  return (
    <Panel title="Cuts in use" note="online devices, by model">
      <Tallies
        tallies={byCut(rows)}
        name="cut"
        filter={filter}
        onFilter={onFilter}
        none="No device has reported a cut."
      />
    </Panel>
  );
}

function Problems({ rows, filter, onFilter }: Part) {
  return (
    <Panel title="Problems by cause" note="devices now">
      <Tallies
        tallies={byCause(rows)}
        name="cause"
        filter={filter}
        onFilter={onFilter}
        none="No device reports a problem."
        bad
      />
    </Panel>
  );
}

interface TalliesProps {
  tallies: Tally[];
  name: string;
  filter: string;
  onFilter: (next: string) => void;
  none: string;
  bad?: boolean;
}

function Tallies({ tallies, name, filter, onFilter, none, bad = false }: TalliesProps) {
  if (tallies.length === 0) return <p class="none">{none}</p>;
  const most = tallies[0]?.count ?? 1;
  return (
    <ul class="bars">
      {tallies.slice(0, MOST_SHOWN).map(({ key, count: many }) => (
        <li key={key}>
          <button
            type="button"
            aria-pressed={has(filter, name, key)}
            onClick={() => onFilter(toggled(filter, name, key))}
            title={key}
          >
            <span class="what">{key}</span>
            <span class="many">{count(many)}</span>
            <Bar share={many / most} bad={bad} />
          </button>
        </li>
      ))}
      <More many={tallies.length - MOST_SHOWN} />
    </ul>
  );
}

function Bar({ share, further = 0, bad = false }: { share: number; further?: number; bad?: boolean }) {
  return (
    <span class={`bar${bad ? " bad" : ""}`} aria-hidden="true">
      <span style={{ width: `${100 * share}%` }} />
      {further > 0 && <span class="coming" style={{ width: `${100 * further}%` }} />}
    </span>
  );
}

function Search({
  filter,
  onFilter,
  shown,
  all,
}: {
  filter: string;
  onFilter: (next: string) => void;
  shown: number;
  all: number;
}) {
  return (
    <search class="search">
      <label for="filter" class="hidden">
        Filter devices
      </label>
      <input
        id="filter"
        type="search"
        placeholder="name, group=… class=… state=… cut=… is=degraded or a label"
        spellcheck={false}
        autocomplete="off"
        value={filter}
        onInput={(event) => onFilter(event.currentTarget.value)}
      />
      <output for="filter">
        {shown === all ? plural(all, "device") : `${count(shown)} of ${plural(all, "device")}`}
      </output>
    </search>
  );
}

const COLUMNS: readonly Column<FleetRow, Key>[] = [
  { key: "state", title: "State", sortable: true, cell: (row) => <Status state={row.state} /> },
  {
    key: "name",
    title: "Device",
    sortable: true,
    cell: (row) => row.name,
  },
  { key: "group", title: "Group", sortable: true, cell: (row) => row.group || NONE },
  { key: "class", title: "Class", sortable: true, cell: (row) => <ClassOf row={row} /> },
  { key: "cut", title: "Model · cut", sortable: true, cell: (row) => <Serving row={row} /> },
  { key: "cause" as Key, title: "Problem", sortable: false, cell: (row) => <Causes row={row} /> },
  {
    key: "p95",
    title: "p95",
    sortable: true,
    numeric: true,
    cell: (row) => <Reported row={row}>{seconds(row.p95_s)}</Reported>,
  },
  {
    key: "fallbacks",
    title: "Fallbacks",
    sortable: true,
    numeric: true,
    cell: (row) => <Reported row={row}>{count(row.fallbacks)}</Reported>,
  },
  {
    key: "failed",
    title: "Failed",
    sortable: true,
    numeric: true,
    cell: (row) => <Reported row={row}>{count(row.failed)}</Reported>,
  },
  { key: "seen", title: "Last seen", sortable: true, numeric: true, cell: (row) => <LastSeen at={row.last_seen} /> },
];

function ClassOf({ row }: { row: FleetRow }) {
  return (
    <>
      {row.class} <Origin emulated={row.emulated} simulated={row.simulated} />
    </>
  );
}

function Serving({ row }: { row: FleetRow }) {
  const [first, ...rest] = row.models;
  if (first === undefined) return <span class="faint">none</span>;
  const steady = first.state === "running" && first.release === first.desired_release;
  return (
    <>
      {first.model} {steady ? <code>{first.row || short(first.release)}</code> : <Status state={first.state} />}
      {rest.length > 0 && <span class="faint"> +{rest.length}</span>}
    </>
  );
}

function Causes({ row }: { row: FleetRow }) {
  const first = row.causes[0];
  if (first === undefined) return null;
  return (
    <span class="bad" title={row.causes.map(({ cause, detail }) => `${cause} ${detail}`).join("\n")}>
      {first.cause}
    </span>
  );
}

/** Figures of a device that is not online are those of its last report, and marked as not current. */
function Reported({ row, children }: { row: FleetRow; children: string }) {
  if (row.requests === 0 && row.p95_s === null) return <span class="faint">{NONE}</span>;
  return row.state === "online" ? (
    <span>{children}</span>
  ) : (
    <span class="old" title="from its last report, not current">
      {children}
    </span>
  );
}

function LastSeen({ at }: { at: number | null }) {
  const now = useCell(clock);
  return <>{age(at, now)}</>;
}
