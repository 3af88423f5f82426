import { useState } from "preact/hooks";

const CHOICES = ["system", "light", "dark"] as const;
type Choice = (typeof CHOICES)[number];
const KEY = "edgesplit.theme";

/** Applies the stored choice, before anything is drawn. */
export function applyTheme(): void {
  apply(storedChoice());
}

export function ThemeSwitch() {
  const [choice, setChoice] = useState<Choice>(storedChoice());
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
        {CHOICES.map((name) => (
          <option key={name} value={name}>
            {name === "system" ? "as the system" : name}
          </option>
        ))}
      </select>
    </label>
  );
}

function storedChoice(): Choice {
  try {
    const stored = localStorage.getItem(KEY);
    return CHOICES.find((name) => name === stored) ?? "system";
  } catch {
    return "system";
  }
}

function apply(choice: Choice): void {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}
