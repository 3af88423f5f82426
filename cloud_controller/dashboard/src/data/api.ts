// Calls of the controller's API, from the page's own origin. The session is a cookie that scripts cannot read; a call
// that changes something shows besides that it came from this page.

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly kind: string,
  ) {
    super(message);
  }
}

/** The controller did not answer. */
export class Unreachable extends Error {}

let csrf = "";
let onSignedOut: () => void = () => {};

export function useCsrf(token: string): void {
  csrf = token;
}

/** What to do when the session has ended. */
export function whenSignedOut(act: () => void): void {
  onSignedOut = act;
}

interface More {
  signal?: AbortSignal | undefined;
  token?: string;
}

export async function call<T>(method: string, path: string, body?: unknown, more: More = {}): Promise<T> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (more.token !== undefined) headers.Authorization = `Bearer ${more.token}`;
  if (method !== "GET" && csrf !== "") headers["X-CSRF-Token"] = csrf;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const init: RequestInit = { method, headers, credentials: "same-origin", cache: "no-store" };
  if (body !== undefined) init.body = JSON.stringify(body);
  if (more.signal !== undefined) init.signal = more.signal;
  let answer: Response;
  try {
    answer = await fetch(path, init);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Unreachable("the controller does not answer");
  }
  if (!answer.ok) throw await refusal(answer);
  return (answer.status === 204 ? undefined : await answer.json()) as T;
}

async function refusal(answer: Response): Promise<Refused> {
  const told: unknown = await answer.json().catch(() => null);
  const said = typeof told === "object" && told !== null ? (told as Record<string, unknown>) : {};
  if (answer.status === 401 && !answer.url.endsWith("/v1/session")) onSignedOut();
  const text = typeof said.error === "string" ? said.error : `the controller answered ${answer.status}`;
  return new Refused(answer.status, text, typeof said.kind === "string" ? said.kind : "");
}

export const get = <T>(path: string, signal?: AbortSignal): Promise<T> => call<T>("GET", path, undefined, { signal });
export const post = <T>(path: string, body: unknown = {}): Promise<T> => call<T>("POST", path, body);

/** A path of names that others chose. */
export function path(...parts: string[]): string {
  return `/v1/${parts.map(encodeURIComponent).join("/")}`;
}
