// Who answers where a cascade or repeated answers are at work, and the promise beside the measurement.

import { factsOf } from "../data/audits";
import type { Audits } from "../data/types";

export function AuditFigures({ audits, old = false }: { audits: Audits; old?: boolean }) {
  return (
    <dl class={`audits${old ? " old" : ""}`}>
      {factsOf(audits).map(({ name, text, warns }) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd class={warns ? "warn" : ""}>{text}</dd>
        </div>
      ))}
    </dl>
  );
}
