import { useResource } from "../data/resource";
import type { Model } from "../data/types";
import { bytes, count, moment } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { to } from "../route";

export function ModelsPage() {
  const { data, error, again } = useResource<Model[]>("/v1/models", (change) => change.kind === "model");
  if (data === null) return error ? <Problem error={error} again={again} /> : <Loading />;
  if (data.length === 0) {
    return <Empty command="edgectl model push FILE.onnx --name NAME">No model has been pushed yet.</Empty>;
  }
  return (
    <>
      <h1>Models</h1>
      {error && <Problem error={error} again={again} />}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Input</th>
              <th scope="col" class="number">
                Layers
              </th>
              <th scope="col" class="number">
                Size
              </th>
              <th scope="col">Pushed</th>
            </tr>
          </thead>
          <tbody>
            {data.toReversed().map((model) => (
              <tr key={model.model}>
                <th scope="row">
                  <a href={to("models", model.model)}>{model.model}</a>
                </th>
                <td class="faint">{model.input ?? "tensors"}</td>
                <td class="number">{count(typeof model.layers === "number" ? model.layers : model.layers.length)}</td>
                <td class="number">{bytes(model.bytes)}</td>
                <td class="nowrap">{moment(model.created_at)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
