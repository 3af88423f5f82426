// A few facts, each under its name.

import type { ComponentChildren } from "preact";

export type Fact = readonly [name: string, fact: ComponentChildren];

export function Figures({ facts, old = false }: { facts: readonly Fact[]; old?: boolean }) {
  return (
    <dl class={`figures${old ? " old" : ""}`}>
      {facts.map(([name, fact]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{fact}</dd>
        </div>
      ))}
    </dl>
  );
}
