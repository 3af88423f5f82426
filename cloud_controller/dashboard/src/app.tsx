import { useEffect, useState } from "preact/hooks";
import { useCell } from "./data/cell";
import { loginCode } from "./data/login";
import { resume, session, signIn } from "./data/session";
import { AgentsPage, isAgent } from "./pages/agents";
import { DevicePage } from "./pages/device";
import { EventsPage } from "./pages/events";
import { FleetPage } from "./pages/fleet";
import { ModelPage } from "./pages/model";
import { ModelsPage } from "./pages/models";
import { RolloutPage } from "./pages/rollout";
import { RolloutsPage } from "./pages/rollouts";
import { SignInPage } from "./pages/signin";
import { SystemPage } from "./pages/system";
import { Empty, Loading, Problem } from "./parts/notes";
import { Shell } from "./parts/shell";
import { route } from "./route";

export function App() {
  const who = useCell(session);
  const [failed, setFailed] = useState<Error | null>(null);
  const [attempt, setAttempt] = useState(0);
  // `attempt` is what makes it begin again
  useEffect(() => {
    setFailed(null);
    begin().catch((error: Error) => setFailed(error));
  }, [attempt]);
  // An address of `edgectl dashboard` that is pasted into this tab changes only what follows #: no page is loaded.
  useEffect(() => {
    const onHash = () => {
      if (loginCode(location.hash) !== null) setAttempt((earlier) => earlier + 1);
    };
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, []);
  if (who === undefined) {
    if (failed === null) return <Loading />;
    return <Problem error={failed} again={() => setAttempt(attempt + 1)} />;
  }
  if (who === null) return <SignInPage failed={failed} />;
  return (
    <Shell>
      <Page />
    </Shell>
  );
}

/** By the code in the address, which is taken out of it at once and works once; else by the session there is. */
async function begin(): Promise<void> {
  const code = loginCode(location.hash);
  if (code === null) return resume();
  history.replaceState(null, "", location.pathname);
  route.value = { parts: [], query: new URLSearchParams() };
  try {
    await signIn(code);
  } catch (error) {
    await resume();
    throw error;
  }
}

function Page() {
  const { parts } = useCell(route);
  const [page = "", name = ""] = parts;
  useEffect(() => {
    document.title = [name, page, "edgesplit"].filter(Boolean).join(" · ");
    scrollTo({ top: 0 });
  }, [page, name]);
  if (page === "") return <FleetPage />;
  if (page === "devices" && name !== "") return <DevicePage key={name} name={name} />;
  if (page === "models" && isAgent(name)) return <AgentsPage reference={name} />;
  if (page === "models") return name === "" ? <ModelsPage /> : <ModelPage key={name} reference={name} />;
  if (page === "rollouts") return name === "" ? <RolloutsPage /> : <RolloutPage key={name} id={name} />;
  if (page === "events") return <EventsPage />;
  if (page === "system") return <SystemPage />;
  return <Empty>There is no such page.</Empty>;
}
