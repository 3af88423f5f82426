// A table, which scrolls within itself on a narrow screen.

import type { ComponentChildren } from "preact";

export interface Column<Row> {
  title: string;
  cell: (row: Row) => ComponentChildren;
  /** Whether it is the header of its row, for screen readers. */
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
  /** Whether the row is highlighted. */
  marked?: (row: Row) => boolean;
  /** Without column titles. */
  bare?: boolean;
  /** Class of the table; `cards` shows each row below the other columns' titles on a narrow screen. */
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
    <td class={own} data-title={column.title}>
      {column.cell(row)}
    </td>
  );
}

/** Of a cell's classes those that its title shares: where it stands, not how it looks. */
function titled(kind = ""): string {
  return kind
    .split(" ")
    .filter((name) => name === "number" || name === "wide")
    .join(" ");
}
