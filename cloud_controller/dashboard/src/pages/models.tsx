import { useResource } from "../data/resource";
import type { Model } from "../data/types";
import { bytes, count, moment, NONE } from "../format";
import { Empty, Loading, Problem } from "../parts/notes";
import { type Column, Table } from "../parts/table";
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
      <Table
        columns={COLUMNS}
        rows={data.toSorted((one, other) => other.created_at - one.created_at)}
        id={(model) => model.model}
      />
    </>
  );
}

export function layersOf(model: Model): number {
  return typeof model.layers === "number" ? model.layers : model.layers.length;
}

const COLUMNS: readonly Column<Model>[] = [
  { title: "Model", heads: true, cell: (model) => <a href={to("models", model.model)}>{model.model}</a> },
  { title: "Input", kind: "faint", cell: (model) => (model.family ? "its variants'" : (model.input ?? "tensors")) },
  { title: "Layers", kind: "number", cell: (model) => (model.family ? NONE : count(layersOf(model))) },
  { title: "Size", kind: "number", cell: (model) => (model.family ? NONE : bytes(model.bytes)) },
  { title: "Pushed", kind: "nowrap", cell: (model) => moment(model.created_at) },
];
