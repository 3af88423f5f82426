import { useState } from "preact/hooks";

const CHOICES = ["system", "light", "dark"] as const;
type Choice = (typeof CHOICES)[number];
const KEY = "edgesplit.theme";

/** The kept choice takes effect before anything is drawn. */
export function applyTheme(): void {
  apply(kept());
}

export function ThemeSwitch() {
  const [choice, setChoice] = useState<Choice>(kept());
  const choose = (next: Choice) => {
    setChoice(next);
    apply(next);
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
    dispatchEvent(new Event("themechange"));
  };
  return (
    <label class="theme">
      <span class="hidden">Colours</span>
      <select value={choice} onChange={(event) => choose(event.currentTarget.value as Choice)}>
        {CHOICES.map((one) => (
          <option key={one} value={one}>
            {one === "system" ? "as the system" : one}
          </option>
        ))}
      </select>
    </label>
  );
}

function kept(): Choice {
  try {
    const found = localStorage.getItem(KEY);
    return CHOICES.find((one) => one === found) ?? "system";
  } catch {
    return "system";
  }
}

function apply(choice: Choice): void {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}
