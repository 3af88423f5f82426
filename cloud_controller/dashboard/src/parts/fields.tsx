// Fields of a form, each under its label.

interface Field {
  label: string;
  value: string;
  onChange: (value: string) => void;
  hint?: string;
}

interface TextFieldProps extends Field {
  required?: boolean;
  placeholder?: string;
  /** Values that are offered; others are accepted too. */
  offered?: readonly string[];
}

export function TextField({ label, value, onChange, hint, required, placeholder, offered }: TextFieldProps) {
  const id = idOf(label);
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="text"
        autocomplete="off"
        autocapitalize="none"
        spellcheck={false}
        required={required === true}
        placeholder={placeholder ?? ""}
        value={value}
        list={offered === undefined ? undefined : `${id}-offered`}
        onInput={(event) => onChange(event.currentTarget.value)}
      />
      {offered !== undefined && (
        <datalist id={`${id}-offered`}>
          {offered.map((each) => (
            <option key={each} value={each} />
          ))}
        </datalist>
      )}
      {hint !== undefined && <p class="faint">{hint}</p>}
    </div>
  );
}

export function ChoiceField({ label, value, onChange, hint, choices }: Field & { choices: readonly string[] }) {
  const id = idOf(label);
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <select id={id} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {choices.map((choice) => (
          <option key={choice}>{choice}</option>
        ))}
      </select>
      {hint !== undefined && <p class="faint">{hint}</p>}
    </div>
  );
}

function idOf(label: string): string {
  return `field-${label.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
}
