// Progress of a stage or a rollout: a bar whose parts differ by pattern as well as colour, and the same as text.

import { shares } from "../data/rollout";
import { count } from "../format";

export function Progress({ states }: { states: Record<string, number> }) {
  const parts = shares(states);
  const all = parts.reduce((sum, part) => sum + part.count, 0);
  const words = parts.map((part) => `${count(part.count)} ${part.title}`).join(", ");
  return (
    <div class="progress">
      <div class="parts" role="img" aria-label={words || "no devices"}>
        {parts.map((part) => (
          <span key={part.tone} class={part.tone} style={{ width: `${(100 * part.count) / all}%` }} title={words} />
        ))}
      </div>
      <span class="faint" aria-hidden="true">
        {words}
      </span>
    </div>
  );
}
