// An observable value.

import { useEffect, useState } from "preact/hooks";

export class Cell<T> {
  private readonly watchers = new Set<() => void>();

  constructor(private current: T) {}

  get value(): T {
    return this.current;
  }

  set value(next: T) {
    if (Object.is(next, this.current)) return;
    this.current = next;
    for (const watcher of [...this.watchers]) watcher();
  }

  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

/** The value of a cell, and a new drawing at each change. */
export function useCell<T>(cell: Cell<T>): T {
  const [, redraw] = useState(0);
  useEffect(() => {
    const seen = cell.value;
    const stop = cell.watch(() => redraw((count) => count + 1));
    if (!Object.is(seen, cell.value)) redraw((count) => count + 1);
    return stop;
  }, [cell]);
  return cell.value;
}

/** Unix seconds, newly drawn every so often: ages on the page grow. */
export const clock = new Cell(Date.now() / 1000);
// A test's module has no page, and may well be loaded for longer than a second.
if (typeof document !== "undefined")
  setInterval(() => {
    if (document.visibilityState === "visible") clock.value = Date.now() / 1000;
  }, 1000);
