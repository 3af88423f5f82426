// Server-sent events, read from a stream of text that may break anywhere.

export interface ServerEvent {
  kind: string;
  data: string;
}

/** Gives the events that each piece completes. Comments, ids and unknown fields are passed over. */
export class EventReader {
  private rest = "";

  push(piece: string): ServerEvent[] {
    const lines = (this.rest + piece).split(/\r?\n/);
    this.rest = lines.pop() ?? "";
    const events: ServerEvent[] = [];
    for (const line of lines) {
      if (line === "") {
        if (this.data.length > 0) events.push({ kind: this.kind, data: this.data.join("\n") });
        this.kind = "message";
        this.data = [];
      } else if (line.startsWith("event:")) {
        this.kind = line.slice(6).trim();
      } else if (line.startsWith("data:")) {
        this.data.push(line.slice(5).replace(/^ /, ""));
      }
    }
    return events;
  }

  private kind = "message";
  private data: string[] = [];
}

/** Seconds before the next attempt: doubling, at most half a minute, and spread so that a thousand pages whose
 *  controller came back do not all come at once. `random` is from 0 to 1. */
export function pauseBefore(attempt: number, random: number): number {
  const most = Math.min(30, 2 ** Math.min(attempt, 5));
  return most * (0.5 + random / 2);
}
