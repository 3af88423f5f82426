// States by shape and word, and by colour in addition.

const SHAPES: Record<string, { shape: string; tone: string }> = {
  online: { shape: "●", tone: "good" },
  stale: { shape: "◐", tone: "warn" },
  offline: { shape: "○", tone: "bad" },
  claimed: { shape: "◇", tone: "quiet" },
  revoked: { shape: "⊘", tone: "quiet" },
  running: { shape: "●", tone: "good" },
  finished: { shape: "✓", tone: "good" },
  succeeded: { shape: "✓", tone: "good" },
  trial: { shape: "◔", tone: "warn" },
  staged: { shape: "◔", tone: "busy" },
  fetching: { shape: "↓", tone: "busy" },
  assigned: { shape: "…", tone: "busy" },
  queued: { shape: "·", tone: "quiet" },
  scheduled: { shape: "◷", tone: "quiet" },
  waiting: { shape: "‖", tone: "warn" },
  paused: { shape: "‖", tone: "warn" },
  aborting: { shape: "×", tone: "bad" },
  aborted: { shape: "×", tone: "bad" },
  failed: { shape: "×", tone: "bad" },
  "timed out": { shape: "⌛", tone: "bad" },
  "rolled back": { shape: "↩", tone: "bad" },
  "rolling back": { shape: "↩", tone: "warn" },
  "safe mode": { shape: "△", tone: "bad" },
  good: { shape: "●", tone: "good" },
  bad: { shape: "×", tone: "bad" },
  open: { shape: "‖", tone: "warn" },
  applied: { shape: "✓", tone: "good" },
  dismissed: { shape: "–", tone: "quiet" },
  withdrawn: { shape: "–", tone: "quiet" },
  unknown: { shape: "?", tone: "quiet" },
  skipped: { shape: "–", tone: "quiet" },
  superseded: { shape: "»", tone: "quiet" },
};

/** `label` replaces the state's name, which is then left to screen readers. */
export function Status({ state, label }: { state: string; label?: string }) {
  const { shape, tone } = SHAPES[state] ?? { shape: "·", tone: "quiet" };
  return (
    <span class={`status ${tone}`}>
      <span class="shape" aria-hidden="true">
        {shape}
      </span>
      {label ?? state}
      {label !== undefined && <span class="hidden"> {state}</span>}
    </span>
  );
}

export function tone(state: string): string {
  return SHAPES[state]?.tone ?? "quiet";
}

/** How many of the counted devices are emulated or simulated; nothing where none is. */
export function OriginCounts({ emulated, simulated }: { emulated: number; simulated: number }) {
  const parts = [emulated > 0 && `${emulated} emulated`, simulated > 0 && `${simulated} simulated`].filter(Boolean);
  return parts.length === 0 ? null : <span class="mark">{parts.join(", ")}</span>;
}

/** The mark of an emulated or simulated device. */
export function Origin({ emulated, simulated }: { emulated: boolean; simulated?: boolean | undefined }) {
  if (simulated) return <span class="mark">simulated</span>;
  return emulated ? <span class="mark">emulated</span> : null;
}
