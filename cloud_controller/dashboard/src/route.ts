// Where the page is, in the part of the address that is never sent: `#/devices/cam-1?q=...`.

import { Cell } from "./data/cell";
import { loginCode } from "./data/login";

export interface Route {
  parts: string[];
  query: URLSearchParams;
}

export function parsed(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/** The address of a page; names that others chose are safe in it. */
export function to(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

export const route = new Cell<Route>(parsed(location.hash));
addEventListener("hashchange", () => {
  if (loginCode(location.hash) === null) route.value = parsed(location.hash);
});

/** Change what follows `?` without a step in the history. */
export function replaceQuery(query: Record<string, string>): void {
  const filled = Object.entries(query).filter(([, value]) => value !== "");
  const text = new URLSearchParams(filled).toString();
  const path = location.hash.split("?")[0] ?? "#/";
  history.replaceState(null, "", `${path === "" ? "#/" : path}${text === "" ? "" : `?${text}`}`);
  route.value = parsed(location.hash);
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
