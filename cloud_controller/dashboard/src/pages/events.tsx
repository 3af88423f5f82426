import { useState } from "preact/hooks";
import { detailText, eventName, shortened } from "../data/event_names";
import { useResource } from "../data/resource";
import type { Event } from "../data/types";
import { moment } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { type Column, Table } from "../parts/table";
import { to } from "../route";
import { AGENT } from "./agents";

export function EventsPage() {
  const { data, error, again } = useResource<Event[]>("/v1/events?newest=1000", () => true);
  const [filter, setFilter] = useState("");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = data.toReversed().filter((event) => words.every((word) => searchText(event).includes(word)));
  return (
    <>
      <h1>Events</h1>
      {error && <Problem error={error} again={again} />}
      <search class="search">
        <label for="filter" class="hidden">
          Filter events
        </label>
        <input
          id="filter"
          type="search"
          placeholder="operator, event or subject"
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
        />
        <output for="filter">
          {chosen.length} of the newest {data.length}
        </output>
      </search>
      {chosen.length === 0 ? <Empty>No event matches.</Empty> : <EventTable events={chosen} />}
    </>
  );
}

export function EventTable({ events }: { events: readonly Event[] }) {
  return <Table name="events" columns={COLUMNS} rows={events} id={(event) => event.id} />;
}

const COLUMNS: readonly Column<Event>[] = [
  { title: "Time", kind: "nowrap", cell: (event) => moment(event.at) },
  { title: "By", cell: (event) => event.actor },
  { title: "Event", cell: (event) => <span title={event.action}>{eventName(event)}</span> },
  { title: "Subject", cell: (event) => <Subject event={event} /> },
  { title: "Detail", kind: "faint detail", cell: (event) => detailText(event.detail) },
];

function Subject({ event }: { event: Event }) {
  if (event.action.startsWith("device.")) return <a href={to("devices", event.subject)}>{event.subject}</a>;
  if (event.action.startsWith("model.")) return <a href={to("models", event.subject)}>{event.subject}</a>;
  if (event.action.startsWith("agent.")) return <a href={to("models", AGENT)}>{event.subject}</a>;
  if (/^(rollout|deployment)\./.test(event.action)) return <a href={to("rollouts", event.subject)}>{event.subject}</a>;
  return <>{shortened(event.subject)}</>;
}

function searchText(event: Event): string {
  return `${event.actor} ${event.action} ${eventName(event)} ${event.subject} ${detailText(event.detail)}`.toLowerCase();
}
