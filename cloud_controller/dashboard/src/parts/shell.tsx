// The frame of every page: navigation, whether the page is live, the signed-in operator.

import type { ComponentChildren } from "preact";
import { clock, useCell } from "../data/cell";
import { liveState } from "../data/live";
import { session, signOut } from "../data/session";
import { age } from "../format";
import { route, to } from "../route";
import { ThemeSwitch } from "./theme";

const PAGES = [
  { part: "", title: "Fleet" },
  { part: "rollouts", title: "Rollouts" },
  { part: "models", title: "Models" },
  { part: "events", title: "Events" },
  { part: "system", title: "System" },
];

export function Shell({ children }: { children: ComponentChildren }) {
  const { parts } = useCell(route);
  const signedIn = useCell(session);
  const here = parts[0] === "devices" ? "" : (parts[0] ?? "");
  return (
    <>
      <button type="button" class="skip" onClick={() => document.getElementById("main")?.focus()}>
        Skip to the page
      </button>
      <header class="top">
        <a class="brand" href={to()}>
          edgesplit
        </a>
        <nav aria-label="Pages">
          {PAGES.map(({ part, title }) => (
            <a key={part} href={part === "" ? to() : to(part)} aria-current={here === part ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <div class="side">
          <Live />
          <ThemeSwitch />
          {signedIn && (
            <span class="who">
              <span class="hidden">Signed in as </span>
              {signedIn.operator}
              <span class="faint"> {signedIn.role}</span>
              <button type="button" class="plain" onClick={() => void signOut()}>
                Sign out
              </button>
            </span>
          )}
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        {children}
      </main>
    </>
  );
}

function Live() {
  const { live, since } = useCell(liveState);
  const now = useCell(clock);
  const words = live ? "live" : since === null ? "connecting" : `not live for ${age(since, now)}`;
  return (
    <output
      class={`live ${live ? "good" : "warn"}`}
      title={live ? "Changes are shown as they happen" : "The page may not be current"}
    >
      <span class="shape" aria-hidden="true">
        {live ? "●" : "◐"}
      </span>
      {words}
    </output>
  );
}
