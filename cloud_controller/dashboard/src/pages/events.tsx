import { useState } from "preact/hooks";
import { useResource } from "../data/resource";
import type { Event } from "../data/types";
import { moment } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { to } from "../route";

export function EventsPage() {
  const { data, error, again } = useResource<Event[]>("/v1/events?newest=1000", () => true);
  const [filter, setFilter] = useState("");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = data.toReversed().filter((event) => words.every((word) => spelt(event).includes(word)));
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
          placeholder="who, what or whom"
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
  return (
    <div class="scroll">
      <table class="events">
        <thead>
          <tr>
            <th scope="col">At</th>
            <th scope="col">Who</th>
            <th scope="col">What</th>
            <th scope="col">Whom</th>
            <th scope="col">Detail</th>
          </tr>
        </thead>
        <tbody>
          {events.map((event) => (
            <tr key={event.id}>
              <td class="nowrap">{moment(event.at)}</td>
              <td>{event.who}</td>
              <td>{event.what}</td>
              <td>
                <Subject event={event} />
              </td>
              <td class="faint detail">{detail(event)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Subject({ event }: { event: Event }) {
  if (event.what.startsWith("device.")) return <a href={to("devices", event.subject)}>{event.subject}</a>;
  if (event.what.startsWith("model.")) return <a href={to("models", event.subject)}>{event.subject}</a>;
  if (event.what.startsWith("rollout.")) return <a href={to("rollouts", event.subject)}>{event.subject}</a>;
  return <>{shortened(event.subject)}</>;
}

/** Digests and serial numbers by their beginnings: the whole of them is for programs (edgectl audit). */
function shortened(text: string): string {
  return text.replace(/\b(?:[0-9a-f]{40,}|\d{30,})\b/g, (long) => `${long.slice(0, 12)}…`);
}

function detail(event: Event): string {
  return Object.entries(event.detail)
    .filter(([, value]) => value !== null && value !== "")
    .map(([key, value]) => `${key} ${shortened(typeof value === "object" ? JSON.stringify(value) : String(value))}`)
    .join(" · ");
}

function spelt(event: Event): string {
  return `${event.who} ${event.what} ${event.subject} ${detail(event)}`.toLowerCase();
}
