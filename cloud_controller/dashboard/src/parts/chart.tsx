// A chart in the page's colours, as wide as there is room, with its content as text for screen readers.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { NONE } from "../format";
import { aroundPoint, LEAST_TIME_S, logarithmicRange, steps } from "./axis_range";
import { loneValues } from "./lone_values";

/** Least pixels beside a chart for its axis, so that charts below each other line up; and between a text and the chart. */
const LEAST_AXIS = 58;
const AXIS_GAP = 14;

export type Colour = "device" | "link" | "remote" | "ink" | "faint" | "warn" | "cut1" | "cut2" | "cut3" | "cut4";

export interface Line {
  label: string;
  colour: Colour;
  values: (number | null)[];
  /** The legend's text for a point, where that is not the drawn value. */
  tooltip?: (index: number) => string;
  width?: number;
  filled?: boolean;
  dashed?: boolean;
  scale?: string;
  unlisted?: boolean;
}

export interface Axis {
  format: (value: number) => string;
  logarithmic?: boolean;
  least?: number;
  /** The range ends here, where values lie above. */
  most?: number;
  /** Shown with so much room above and below, instead of from nought. */
  around?: number;
  /** Counts: no tick between two whole numbers. */
  whole?: boolean;
}

export interface ChartProps {
  label: string;
  x: number[];
  lines: Line[];
  xAxis: Axis & { time?: boolean; name?: string };
  yAxis: Axis;
  /** A second axis at the right, for lines of scale `right`. */
  rightAxis?: Axis;
  height?: number;
  point?: { x: number; y: number; label: string } | undefined;
  /** The value of x that the legend shows without a pointer; the newest by default. */
  rest?: number;
}

export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const drawn = useRef(props);
  drawn.current = props;
  const theme = useThemeChanges();
  const shape = JSON.stringify([
    props.lines.map((line) => [line.label, line.colour, line.width, line.filled, line.scale]),
    props.xAxis.logarithmic,
    props.yAxis.logarithmic,
    props.rightAxis !== undefined,
    theme,
  ]);

  // a chart is created again where its shape changes
  useEffect(() => {
    const element = place.current;
    if (element === null) return;
    const created = new uPlot(options(drawn, element.clientWidth), data(drawn.current), element);
    plot.current = created;
    const watcher = new ResizeObserver(() => {
      if (element.clientWidth > 0) created.setSize({ width: element.clientWidth, height: drawn.current.height ?? 180 });
    });
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      created.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => plot.current?.setData(data(props)), [props]);

  return <div ref={place} class="chart" role="img" aria-label={props.label} />;
}

function data(props: ChartProps): uPlot.AlignedData {
  return [props.x, ...props.lines.map((line) => line.values)];
}

function options(props: { current: ChartProps }, width: number): uPlot.Options {
  const { lines, xAxis, yAxis, rightAxis, height } = props.current;
  const ink = colour("faint");
  const grid = { stroke: css("--grid"), width: 1 };
  const font = `11px ${css("--font")}`;
  const axis = (given: Axis): uPlot.Axis => ({
    stroke: ink,
    grid,
    ticks: { show: false },
    font,
    size: (_: uPlot, values: string[] | null) => axisWidth(values ?? [], font),
    ...(given.logarithmic ? { splits: (_: uPlot, __: number, low: number, high: number) => steps(low, high) } : {}),
    ...(given.whole ? { incrs: steps(1, 1e12) } : {}),
    values: (_, values) => values.map((value) => (value === null ? "" : given.format(value))),
  });
  const scale = (given: Axis): uPlot.Scale =>
    given.logarithmic
      ? { distr: 3, range: (_, low, high) => logarithmicRange(low, high) }
      : { range: (_, low, high) => ranged(given, low, high) };
  return {
    width,
    height: height ?? 180,
    padding: [10, rightAxis === undefined ? 18 : 0, 0, 0], // half of a time's text reaches over the right end
    legend: { live: true },
    focus: { alpha: 1 },
    cursor: { points: { size: 6 }, drag: { x: false, y: false } },
    scales: {
      x: {
        time: xAxis.time === true,
        range: (_, low, high) => (xAxis.time && high - low < LEAST_TIME_S ? aroundPoint(low, high) : [low, high]),
        ...(xAxis.logarithmic ? { distr: 3 as const } : {}),
      },
      y: scale(yAxis),
      ...(rightAxis === undefined ? {} : { right: scale(rightAxis) }),
    },
    axes: [
      {
        stroke: ink,
        grid: { show: false },
        ticks: { show: true, stroke: css("--grid"), size: 4 },
        size: 28,
        font,
        ...(xAxis.logarithmic ? { splits: (_: uPlot, __: number, low: number, high: number) => steps(low, high) } : {}),
        values: (_, values) => values.map((value) => (value === null ? "" : tick(value, values, xAxis))),
      },
      { ...axis(yAxis), scale: "y" },
      ...(rightAxis === undefined
        ? []
        : [{ ...axis(rightAxis), side: 1 as const, scale: "right", grid: { show: false } }]),
    ],
    series: [
      { label: xAxis.name ?? "at", value: (_, value) => (value === null ? "" : at(value, xAxis)) },
      ...lines.map((line, place) => series(props, line, place)),
    ],
    hooks: {
      draw: [(plot) => mark(plot, props.current.point)],
      ready: [(plot) => tellAtRest(plot, props.current.rest)],
      setData: [(plot) => tellAtRest(plot, props.current.rest)],
      setCursor: [(plot) => (plot.cursor.left ?? -1) < 0 && tellAtRest(plot, props.current.rest)],
    },
  };
}

function series(props: { current: ChartProps }, line: Line, place: number): uPlot.Series {
  const axis = line.scale === "right" && props.current.rightAxis ? props.current.rightAxis : props.current.yAxis;
  return {
    label: line.label,
    scale: line.scale ?? "y",
    stroke: colour(line.colour),
    width: line.width ?? 1.5,
    points: { show: false, size: 4, filter: (plot, drawn) => loneValues(plot.data[drawn] ?? []) },
    ...(line.dashed ? { dash: [5, 4] } : {}),
    ...(line.filled ? { fill: `${colour(line.colour)}${css("--fill")}` } : {}),
    ...(line.unlisted ? { class: "unlisted" } : {}),
    value: (_, value, __, index) => {
      if (index === null) return "";
      if (value === null || value === undefined) return NONE;
      const tooltip = props.current.lines[place]?.tooltip;
      return tooltip ? tooltip(index) : axis.format(value);
    },
  };
}

function at(value: number, axis: ChartProps["xAxis"]): string {
  return axis.time ? new Date(value * 1000).toLocaleTimeString("en-GB") : axis.format(value);
}

/** Without a pointer the legend shows the newest figures, or those at `rest`. */
function tellAtRest(plot: uPlot, rest: number | undefined): void {
  const places = plot.data[0];
  if (places.length === 0) return;
  const past = rest === undefined ? -1 : places.findIndex((x) => x >= rest);
  plot.setLegend({ idx: past < 0 ? places.length - 1 : past }, false);
}

function tick(value: number, all: number[], axis: ChartProps["xAxis"]): string {
  if (!axis.time) return axis.format(value);
  const date = new Date(value * 1000);
  const apart = (all[1] ?? value) - (all[0] ?? value);
  const two = (part: number) => String(part).padStart(2, "0");
  if (apart >= 86_400) return `${date.getDate()}.${date.getMonth() + 1}.`;
  const minutes = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return apart > 0 && apart < 60 ? `${minutes}:${two(date.getSeconds())}` : minutes;
}

/** From zero, or from the axis's `least`, with some space above; `around` the values where zero is no useful bound. */
function ranged(axis: Axis, low: number | null, high: number | null): [number, number] {
  if (axis.around !== undefined && low !== null && high !== null) return [low - axis.around, high + axis.around];
  const top = high === null || high <= 0 ? 1 : high * 1.08;
  return [axis.least ?? Math.min(0, low ?? 0), axis.most === undefined ? top : Math.min(top, axis.most)];
}

function mark(plot: uPlot, point: ChartProps["point"]): void {
  if (point === undefined) return;
  const [x, y] = [plot.valToPos(point.x, "x", true), plot.valToPos(point.y, "y", true)];
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  const held = Math.max(top, Math.min(top + height, y));
  const [pen, scale] = [plot.ctx, devicePixelRatio];
  pen.save();
  pen.strokeStyle = colour("ink");
  pen.fillStyle = css("--panel");
  pen.lineWidth = scale;
  pen.setLineDash([3 * scale, 3 * scale]);
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, top + height);
  pen.stroke();
  pen.setLineDash([]);
  pen.lineWidth = 2 * scale;
  pen.beginPath();
  pen.arc(x, held, 5 * scale, 0, 2 * Math.PI);
  pen.fill();
  pen.stroke();
  pen.fillStyle = colour("ink");
  pen.font = `600 ${11 * scale}px ${css("--font")}`;
  const taken = pen.measureText(point.label).width;
  const beside = x + taken + 9 * scale < left + width ? x + 9 * scale : x - taken - 9 * scale;
  // where neither side has room for all of it, as on a phone, it crosses the line
  const from = Math.max(left, Math.min(beside, left + width - taken));
  pen.textAlign = "left";
  pen.fillText(point.label, from, Math.max(held - 8 * scale, top + 11 * scale));
  pen.restore();
}

/** Pixels that an axis needs for its longest text. */
function axisWidth(values: readonly string[], font: string): number {
  const pen = document.createElement("canvas").getContext("2d");
  if (pen === null) return LEAST_AXIS;
  pen.font = font;
  return Math.max(LEAST_AXIS, ...values.map((value) => Math.ceil(pen.measureText(value).width) + AXIS_GAP));
}

function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(name: Colour): string {
  return css(`--${name}`);
}

/** A number that grows when the colours change. */
function useThemeChanges(): number {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const changed = () => setCount((before) => before + 1);
    const query = matchMedia("(prefers-color-scheme: dark)");
    query.addEventListener("change", changed);
    addEventListener("themechange", changed);
    return () => {
      query.removeEventListener("change", changed);
      removeEventListener("themechange", changed);
    };
  }, []);
  return count;
}
