// Follows what changes on the controller, connects again when the stream breaks or falls silent, and says for how long
// what is shown has not been live.

import { Cell } from "./cell";
import { EventReader, pauseBefore } from "./sse";

export type Subject = { kind: string; subject: string };
type Listener = (changes: readonly Subject[]) => void;

export interface LiveState {
  live: boolean;
  /** When it last was, in Unix seconds; null before the first connection. */
  since: number | null;
}

export const liveState = new Cell<LiveState>({ live: false, since: null });
/** Changed at once for many subjects: read everything again. */
export const EVERYTHING = "everything";

const listeners = new Set<Listener>();
let running: AbortController | null = null;
let heartbeat = 15;

export function onChanges(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function follow(): void {
  if (running !== null) return;
  running = new AbortController();
  void keepFollowing(running.signal);
}

export function unfollow(): void {
  running?.abort();
  running = null;
  liveState.value = { live: false, since: null };
}

async function keepFollowing(signal: AbortSignal): Promise<void> {
  let attempt = 0;
  while (!signal.aborted) {
    const began = Date.now();
    const status = await followOnce(signal).catch(() => 0);
    if (signal.aborted) return;
    if (liveState.value.live) liveState.value = { live: false, since: Date.now() / 1000 };
    if (status === 401) return;
    attempt = Date.now() - began > 30_000 ? 0 : attempt + 1;
    await pause(1000 * pauseBefore(attempt, Math.random()), signal);
  }
}

/** One connection until it ends; the status of its answer. */
async function followOnce(signal: AbortSignal): Promise<number> {
  const ended = new AbortController();
  const end = () => ended.abort();
  signal.addEventListener("abort", end);
  let silent = setTimeout(end, 20_000);
  try {
    const headers = { Accept: "text/event-stream" };
    const answer = await fetch("/v1/live", { headers, cache: "no-store", signal: ended.signal });
    if (!answer.ok || answer.body === null) return answer.status;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return answer.status;
      clearTimeout(silent);
      silent = setTimeout(end, 2_500 * heartbeat);
      hear(events.push(value));
    }
  } finally {
    clearTimeout(silent);
    signal.removeEventListener("abort", end);
  }
}

function hear(events: readonly { kind: string; data: string }[]): void {
  const changes: Subject[] = [];
  for (const { kind, data } of events) {
    const content = JSON.parse(data) as { subject?: string; heartbeat_s?: number };
    if (kind === "hello") {
      if (content.heartbeat_s !== undefined) heartbeat = content.heartbeat_s;
      const first = liveState.value.since === null;
      liveState.value = { live: true, since: Date.now() / 1000 };
      if (!first) changes.push({ kind: EVERYTHING, subject: "" }); // whatever was missed meanwhile
    } else if (kind !== "heartbeat") {
      changes.push({ kind, subject: content.subject ?? "" });
    }
  }
  if (changes.length > 0) for (const listener of [...listeners]) listener(changes);
}

function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((done) => {
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    });
  });
}
