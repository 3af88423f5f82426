// Empty state, loading state, error, and the titled panel.

import type { ComponentChildren } from "preact";

export function Empty({ children, command }: { children: ComponentChildren; command?: string }) {
  return (
    <div class="empty">
      <p>{children}</p>
      {command !== undefined && (
        <pre class="command">
          <code>{command}</code>
        </pre>
      )}
    </div>
  );
}

export function Loading() {
  return (
    <p class="empty" role="status">
      Loading…
    </p>
  );
}

export function Problem({ error, again }: { error: Error; again?: () => void }) {
  return (
    <div class="problem" role="alert">
      <p>{error.message}</p>
      {again !== undefined && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
    </div>
  );
}

/** A titled part of a page. */
export function Panel({
  title,
  note,
  children,
}: {
  title: string;
  note?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section class="panel" aria-label={title}>
      <header>
        <h2>{title}</h2>
        {note !== undefined && <span class="note">{note}</span>}
      </header>
      {children}
    </section>
  );
}
