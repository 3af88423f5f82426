// Follows the controller's stream of changes, reconnects when it breaks or falls silent, and knows since when the page has
// not been live.
//
// All tabs of one browser share one stream: a browser opens only a few connections to a host, and a stream takes one for
// good. The tab that holds the lock follows, and tells the others over a channel; when it is closed, the next one does.

import { Cell } from "./cell";
import { EventReader, pauseBefore } from "./sse";

export type Subject = { kind: string; subject: string };
type Listener = (changes: readonly Subject[]) => void;
type TabMessage = { changes: Subject[] } | { state: LiveState } | { asks: true };

export interface LiveState {
  live: boolean;
  /** When it last was, in Unix seconds; null before the first connection. */
  since: number | null;
}

export const liveState = new Cell<LiveState>({ live: false, since: null });
/** Changed at once for many subjects: read everything again. */
export const EVERYTHING = "everything";

const LOCK = "edgesplit.live";
const listeners = new Set<Listener>();
let following: { ending: AbortController; channel: BroadcastChannel } | null = null;
let leads = false;
let heartbeat = 15;

export function onChanges(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function follow(): void {
  if (following !== null) return;
  const ending = new AbortController();
  const channel = new BroadcastChannel(LOCK);
  following = { ending, channel };
  addEventListener("pagehide", leave, { once: true });
  channel.onmessage = (message) => onTabMessage(message.data as TabMessage);
  channel.postMessage({ asks: true } satisfies TabMessage);
  const lead = async () => {
    leads = true;
    await keepFollowing(ending.signal);
    leads = false;
  };
  navigator.locks.request(LOCK, { signal: ending.signal }, lead).catch(() => {
    // Signed out before this tab's turn came.
  });
}

export function unfollow(): void {
  following?.ending.abort();
  following?.channel.close();
  following = null;
  liveState.value = { live: false, since: null };
}

/** A page that the browser keeps for the way back would keep its connection, too. */
function leave(): void {
  const { since } = liveState.value;
  if (following === null) return;
  unfollow();
  liveState.value = { live: false, since: since ?? Date.now() / 1000 };
  addEventListener("pageshow", follow, { once: true });
}

/** From the tab that follows for all. */
function onTabMessage(message: TabMessage): void {
  if ("asks" in message) {
    if (leads) following?.channel.postMessage({ state: liveState.value } satisfies TabMessage);
  } else if (!leads && "state" in message) {
    const missed = message.state.live && !liveState.value.live && liveState.value.since !== null;
    liveState.value = message.state;
    if (missed) notify([{ kind: EVERYTHING, subject: "" }]);
  } else if (!leads && "changes" in message) {
    notify(message.changes);
  }
}

function broadcast(message: TabMessage): void {
  if ("state" in message) liveState.value = message.state;
  following?.channel.postMessage(message);
}

function notify(changes: readonly Subject[]): void {
  for (const listener of [...listeners]) listener(changes);
}

async function keepFollowing(signal: AbortSignal): Promise<void> {
  let attempt = 0;
  while (!signal.aborted) {
    const began = Date.now();
    const status = await followOnce(signal).catch(() => 0);
    if (signal.aborted) return;
    if (liveState.value.live) broadcast({ state: { live: false, since: Date.now() / 1000 } });
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
    const response = await fetch("/v1/events/stream", { headers, cache: "no-store", signal: ended.signal });
    if (!response.ok || response.body === null) return response.status;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return response.status;
      clearTimeout(silent);
      silent = setTimeout(end, 2_500 * heartbeat);
      onEvents(events.push(value));
    }
  } finally {
    clearTimeout(silent);
    signal.removeEventListener("abort", end);
  }
}

function onEvents(events: readonly { kind: string; data: string }[]): void {
  const changes: Subject[] = [];
  for (const { kind, data } of events) {
    const content = JSON.parse(data) as { subject?: string; heartbeat_s?: number };
    if (kind === "hello") {
      if (content.heartbeat_s !== undefined) heartbeat = content.heartbeat_s;
      if (liveState.value.since !== null) changes.push({ kind: EVERYTHING, subject: "" }); // what was missed meanwhile
      broadcast({ state: { live: true, since: Date.now() / 1000 } });
    } else if (kind !== "heartbeat") {
      changes.push({ kind, subject: content.subject ?? "" });
    }
  }
  if (changes.length === 0) return;
  broadcast({ changes });
  notify(changes);
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
