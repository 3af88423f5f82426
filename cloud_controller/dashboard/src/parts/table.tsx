// Rows of one kind under titles. On a narrow screen it scrolls within itself.

import type { ComponentChildren } from "preact";

export interface Column<Row> {
  title: string;
  cell: (row: Row) => ComponentChildren;
  /** What the row is named by, for who hears the page. */
  heads?: boolean;
  /** Classes of its cells: `number`, `nowrap`, `wide`, `detail`. */
  kind?: string;
  /** A further class, by the row: `bad`, `warn`. */
  tone?: (row: Row) => string;
}

interface Props<Row> {
  columns: readonly Column<Row>[];
  rows: readonly Row[];
  id: (row: Row) => string | number;
  /** Is this row the one that the page is about? */
  marked?: (row: Row) => boolean;
  /** Without titles, where what stands there speaks for itself. */
  bare?: boolean;
  name?: string;
}

export function Table<Row>({ columns, rows, id, marked, bare = false, name = "" }: Props<Row>) {
  return (
    <div class="scroll">
      <table class={name}>
        {!bare && (
          <thead>
            <tr>
              {columns.map((column) => (
                <th key={column.title} scope="col" class={titled(column.kind)}>
                  {column.title}
                </th>
              ))}
            </tr>
          </thead>
        )}
        <tbody>
          {rows.map((row) => (
            <tr key={id(row)} class={marked?.(row) ? "best" : ""}>
              {columns.map((column) => (
                <Cell key={column.title} column={column} row={row} />
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Cell<Row>({ column, row }: { column: Column<Row>; row: Row }) {
  const own = [column.kind, column.tone?.(row)].filter(Boolean).join(" ");
  return column.heads ? (
    <th scope="row" class={own}>
      {column.cell(row)}
    </th>
  ) : (
    <td class={own}>{column.cell(row)}</td>
  );
}

/** Of a cell's classes those that its title shares: where it stands, not how it looks. */
function titled(kind = ""): string {
  return kind
    .split(" ")
    .filter((one) => one === "number" || one === "wide")
    .join(" ");
}
