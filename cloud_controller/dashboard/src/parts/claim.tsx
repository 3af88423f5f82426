// Claiming a device: a one-time text with which a new device enrols, shown once.

import { useState } from "preact/hooks";
import { post } from "../data/api";
import { useResource } from "../data/resource";
import type { Claim } from "../data/types";
import { moment } from "../format";
import { Confirm } from "./confirm";
import { CloseButton, Dialog } from "./dialog";
import { ChoiceField, TextField } from "./fields";

const LINKS = ["wifi", "lte", "3g"];

export function ClaimButton() {
  const [asking, setAsking] = useState(false);
  const [claim, setClaim] = useState<Claim | null>(null);
  return (
    <>
      <button type="button" class="primary" onClick={() => setAsking(true)}>
        Claim a device
      </button>
      {asking && <AskForClaim onClaim={setClaim} onClose={() => setAsking(false)} />}
      {claim !== null && <ClaimText claim={claim} onClose={() => setClaim(null)} />}
    </>
  );
}

function AskForClaim({ onClaim, onClose }: { onClaim: (claim: Claim) => void; onClose: () => void }) {
  const profiles = useResource<{ name: string }[]>("/v1/profiles", () => false);
  const names = (profiles.data ?? []).map((profile) => profile.name);
  const [name, setName] = useState("");
  const [chosen, setChosen] = useState("raspberrypi4");
  const [link, setLink] = useState("wifi");
  const [group, setGroup] = useState("");
  return (
    <Confirm
      title="Claim a device"
      act="Make the claim"
      onAct={async () =>
        onClaim(
          await post<Claim>("/v1/devices/claims", {
            device: name.trim(),
            device_class: chosen,
            link: link.trim() || null,
            group: group.trim() || null,
          }),
        )
      }
      onClose={onClose}
    >
      <TextField label="Name" value={name} onChange={setName} required placeholder="cam-1" />
      <ChoiceField
        label="Device class"
        value={chosen}
        onChange={setChosen}
        choices={names.length === 0 ? [chosen] : names}
      />
      <TextField label="Link" value={link} onChange={setLink} offered={LINKS} hint="What plans assume for it." />
      <TextField label="Group" value={group} onChange={setGroup} hint="May be empty." />
    </Confirm>
  );
}

/** The claim's text and what to do with it. It is not kept: after the dialog was closed it is gone. */
function ClaimText({ claim, onClose }: { claim: Claim; onClose: () => void }) {
  const [copied, setCopied] = useState(false);
  const text = JSON.stringify(claim);
  const file = `${claim.device}.claim`;
  const card = claim.device_class.startsWith("raspberrypi") || claim.device_class.startsWith("jetson");
  return (
    <Dialog title={`Claim for ${claim.device}`} onClose={onClose}>
      <p class="words">It works once, until {moment(claim.expires)}, and is shown only now. Keep it like a password.</p>
      <textarea readOnly rows={5} aria-label="The claim" value={text} />
      <div class="actions start">
        <button type="button" onClick={() => void navigator.clipboard.writeText(text).then(() => setCopied(true))}>
          {copied ? "Copied" : "Copy"}
        </button>
        <button type="button" onClick={() => save(file, text)}>
          Save as {file}
        </button>
      </div>
      <p class="words">On the device, with the agent installed:</p>
      <pre class="command">
        <code>edgesplit-agent run --data edgesplit --claim {file}</code>
      </pre>
      {card && (
        <>
          <p class="words">Or write it onto a card that installs the agent at its first start:</p>
          <pre class="command">
            <code>
              edgectl flash --device {claim.device_class} --image IMAGE --to /dev/sdX --hostname {claim.device} --claim{" "}
              {file}
            </code>
          </pre>
        </>
      )}
      <p class="words">
        A machine that runs already and is reached by SSH needs no claim from here:{" "}
        <code>
          edgectl adopt USER@HOST --name {claim.device} --device-class {claim.device_class}
        </code>
      </p>
      <div class="actions">
        <CloseButton>Close</CloseButton>
      </div>
    </Dialog>
  );
}

function save(name: string, text: string): void {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  URL.revokeObjectURL(address);
}
