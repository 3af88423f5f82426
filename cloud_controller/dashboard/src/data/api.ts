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

/** The controller could not be reached. */
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
  let response: Response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Unreachable("the controller does not answer");
  }
  if (!response.ok) throw await refusal(response);
  return (response.status === 204 ? undefined : await response.json()) as T;
}

async function refusal(response: Response): Promise<Refused> {
  const body: unknown = await response.json().catch(() => null);
  const fields = typeof body === "object" && body !== null ? (body as Record<string, unknown>) : {};
  if (response.status === 401 && !response.url.endsWith("/v1/session")) onSignedOut();
  const text = typeof fields.error === "string" ? fields.error : `the controller answered ${response.status}`;
  return new Refused(response.status, text, typeof fields.kind === "string" ? fields.kind : "");
}

export const get = <T>(path: string, signal?: AbortSignal): Promise<T> => call<T>("GET", path, undefined, { signal });
export const post = <T>(path: string, body: unknown = {}): Promise<T> => call<T>("POST", path, body);

/** A path of names that others chose. */
export function path(...parts: string[]): string {
  return `/v1/${parts.map(encodeURIComponent).join("/")}`;
}
