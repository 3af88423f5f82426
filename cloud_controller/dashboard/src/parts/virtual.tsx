// A table of any length on a page that scrolls as pages do: only the rows in view are drawn. Arrow keys, Home and End
// walk the rows; Tab enters the table once and leaves it.

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export interface Column<Row, Key extends string> {
  key: Key;
  title: string;
  sortable: boolean;
  numeric?: boolean;
  cell: (row: Row) => ComponentChildren;
}

interface Props<Row, Key extends string> {
  label: string;
  rows: readonly Row[];
  columns: readonly Column<Row, Key>[];
  name: (row: Row) => string;
  href: (row: Row) => string;
  sort: { column: Key; downwards: boolean };
  onSort: (column: Key) => void;
  template: string;
}

const TALL = 60;
const LOW = 32;
const NARROW = "(max-width: 760px)";
const SPARE = 8;

export function VirtualTable<Row, Key extends string>(props: Props<Row, Key>) {
  const { rows, columns, name, href } = props;
  const body = useRef<HTMLDivElement>(null);
  const height = useRowHeight();
  const [from, until] = useView(body, rows.length, height);
  const [active, setActive] = useState(0);
  const wanted = useRef<number | null>(null);
  const current = Math.min(active, Math.max(0, rows.length - 1));

  const walk = (event: KeyboardEvent) => {
    const next = stepped(event.key, current, rows.length, Math.max(1, Math.floor(innerHeight / height) - 3));
    if (next === null) return;
    event.preventDefault();
    setActive(next);
    wanted.current = next;
    const top = (body.current?.getBoundingClientRect().top ?? 0) + scrollY + next * height;
    if (top < scrollY + 80) scrollTo({ top: top - 80 });
    else if (top + height > scrollY + innerHeight - 16) scrollTo({ top: top + height - innerHeight + 16 });
  };

  useLayoutEffect(() => {
    if (wanted.current === null) return;
    const link = body.current?.querySelector<HTMLElement>(`[data-index="${wanted.current}"] a`);
    if (link === null || link === undefined) return;
    link.focus({ preventScroll: true });
    wanted.current = null;
  });

  const shown = rows.slice(from, until);
  return (
    // biome-ignore lint/a11y/useSemanticElements: rows out of view are not drawn, so that it cannot be a <table>
    <div
      class="grid"
      role="grid"
      aria-label={props.label}
      aria-rowcount={rows.length + 1}
      tabIndex={-1}
      onKeyDown={walk}
    >
      {/* biome-ignore lint/a11y/useFocusableInteractive: the links and buttons in rows take the focus */}
      {/* biome-ignore lint/a11y/useSemanticElements: as above */}
      <div class="grid-row head" role="row" aria-rowindex={1} style={{ "--columns": props.template }}>
        {columns.map((column) => (
          <Head key={column.key} column={column} sort={props.sort} onSort={props.onSort} />
        ))}
      </div>
      {/* biome-ignore lint/a11y/useSemanticElements: as above */}
      <div ref={body} role="rowgroup" class="grid-body" style={{ height: `${rows.length * height}px` }}>
        {shown.map((row, place) => {
          const index = from + place;
          return (
            // biome-ignore lint/a11y/useFocusableInteractive: as above
            // biome-ignore lint/a11y/useSemanticElements: as above
            <div
              key={name(row)}
              class="grid-row"
              role="row"
              aria-rowindex={index + 2}
              data-index={index}
              style={{
                "--columns": props.template,
                transform: `translateY(${index * height}px)`,
                height: `${height}px`,
              }}
            >
              {columns.map((column) => (
                // biome-ignore lint/a11y/useFocusableInteractive: as above
                // biome-ignore lint/a11y/useSemanticElements: as above
                <div key={column.key} role="gridcell" class={`cell ${column.key}${column.numeric ? " number" : ""}`}>
                  {column.key === "name" ? (
                    <a href={href(row)} tabIndex={index === current ? 0 : -1} onFocus={() => setActive(index)}>
                      {column.cell(row)}
                    </a>
                  ) : (
                    column.cell(row)
                  )}
                </div>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

interface HeadProps<Row, Key extends string> {
  column: Column<Row, Key>;
  sort: { column: Key; downwards: boolean };
  onSort: (column: Key) => void;
}

function Head<Row, Key extends string>({ column, sort, onSort }: HeadProps<Row, Key>) {
  const sorted = sort.column === column.key ? (sort.downwards ? "descending" : "ascending") : "none";
  return (
    // biome-ignore lint/a11y/useFocusableInteractive: its button takes the focus
    // biome-ignore lint/a11y/useSemanticElements: see the table
    <div role="columnheader" class={`cell ${column.key}${column.numeric ? " number" : ""}`} aria-sort={sorted}>
      {column.sortable ? (
        <button type="button" onClick={() => onSort(column.key)}>
          {column.title}
          <span aria-hidden="true">{sorted === "none" ? "" : sort.downwards ? " ↓" : " ↑"}</span>
        </button>
      ) : (
        column.title
      )}
    </div>
  );
}

/** The row that a key leads to; null for any other key. */
export function stepped(key: string, current: number, length: number, page: number): number | null {
  if (length === 0) return null;
  const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
  if (key === "Home") return 0;
  if (key === "End") return length - 1;
  const step = Object.hasOwn(steps, key) ? steps[key] : undefined;
  return step === undefined ? null : Math.max(0, Math.min(length - 1, current + step));
}

/** The first row to draw and the one after the last; none where the table's `top` is far below the window. */
export function rowsInView(top: number, windowHeight: number, height: number, length: number): [number, number] {
  const first = Math.min(length, Math.max(0, Math.floor(-top / height) - SPARE));
  return [first, Math.max(first, Math.min(length, Math.ceil((windowHeight - top) / height) + SPARE))];
}

function useRowHeight(): number {
  const [narrow, setNarrow] = useState(matchMedia(NARROW).matches);
  useEffect(() => {
    const query = matchMedia(NARROW);
    const change = () => setNarrow(query.matches);
    query.addEventListener("change", change);
    return () => query.removeEventListener("change", change);
  }, []);
  return narrow ? TALL : LOW;
}

/** The first row to draw and the one after the last, as the page scrolls. */
function useView(body: { current: HTMLElement | null }, length: number, height: number): [number, number] {
  const [view, setView] = useState<[number, number]>([0, Math.ceil(innerHeight / LOW)]);
  const measure = useCallback(() => {
    const top = body.current?.getBoundingClientRect().top ?? 0;
    const [first, last] = rowsInView(top, innerHeight, height, length);
    setView((before) => (before[0] === first && before[1] === last ? before : [first, last]));
  }, [body, length, height]);
  useLayoutEffect(measure);
  useEffect(() => {
    addEventListener("scroll", measure, { passive: true });
    addEventListener("resize", measure);
    return () => {
      removeEventListener("scroll", measure);
      removeEventListener("resize", measure);
    };
  }, [measure]);
  return view;
}
