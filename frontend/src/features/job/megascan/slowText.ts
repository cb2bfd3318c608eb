/** Slowdowns as rows and sentences. Pure. */
import type { RankView, Verdict } from "../../../api/types";
import { ABSENT, clock, compact, integer, percent, ratio, seconds } from "../../../store/format";
import { causeName, stateName, subjectName } from "../../../store/verdicts";
import { roleNamed } from "../../../trace/kinds";
import type { SlowCell, SlowLink, Slowdowns } from "./megascanApi";

export interface Grid {
  readonly rows: readonly string[];
  readonly columns: readonly string[];
  readonly values: readonly (readonly (number | null)[])[];
}

/** A stage, with its role where ranks have roles: stages of backward ranks are numbered after those of forward ranks. */
export function stageName(cell: SlowCell, ranks: readonly RankView[]): string {
  const first = ranks.find(({ rank }) => rank === cell.ranks[0]);
  const role = roleNamed(first?.role);
  return role ? `${role.charAt(0).toUpperCase()} ${first?.pp ?? cell.stage}` : `stage ${cell.stage}`;
}

export const cellName = (cell: SlowCell, ranks: readonly RankView[]): string =>
  `${stageName(cell, ranks)}, data ${cell.replica}`;

/** Stages by data-parallel ranks. */
export function placeGrid({ cells }: Slowdowns, ranks: readonly RankView[]): Grid {
  const first = new Map<number, SlowCell>();
  for (const cell of cells) if (!first.has(cell.stage)) first.set(cell.stage, cell);
  const stages = [...first].map(([stage, cell]) => [stage, stageName(cell, ranks)] as const);
  const replicas = [...new Set(cells.map(({ replica }) => replica))].sort((left, right) => left - right);
  const value = new Map(cells.map((cell) => [`${cell.stage} ${cell.replica}`, cell.slowdown]));
  return {
    rows: stages.map(([, name]) => name),
    columns: replicas.map(String),
    values: stages.map(([stage]) => replicas.map((replica) => value.get(`${stage} ${replica}`) ?? null)),
  };
}

/** Where the cells are in `placeGrid`. */
export interface CellPlaces {
  readonly at: (row: number, column: number) => SlowCell | undefined;
  readonly of: (cell: SlowCell) => { readonly row: number; readonly column: number };
}

export function cellPlaces({ cells }: Slowdowns): CellPlaces {
  const rows = new Map([...new Set(cells.map(({ stage }) => stage))].map((stage, row) => [stage, row]));
  const replicas = [...new Set(cells.map(({ replica }) => replica))].sort((left, right) => left - right);
  const columns = new Map(replicas.map((replica, column) => [replica, column]));
  const of = ({ stage, replica }: SlowCell): { row: number; column: number } => ({
    row: rows.get(stage) ?? 0,
    column: columns.get(replica) ?? 0,
  });
  const byPlace = new Map(
    cells.map((cell) => [of(cell).row * columns.size + of(cell).column, cell] as const),
  );
  return { at: (row, column) => byPlace.get(row * columns.size + column), of };
}

/** Cells at most in the map over steps: the slowest ones. */
export const MOST_ROWS = 32;

/** Cells of the map over steps, in the order of stages and replicas. */
export function cellsOverSteps({ cells }: Slowdowns): readonly SlowCell[] {
  const size = (cell: SlowCell): number => Math.max(...cell.steps.map((value) => value ?? 0), 0);
  const least = [...cells].sort((left, right) => size(right) - size(left)).slice(0, MOST_ROWS);
  const shown = new Set(least);
  return cells.filter((cell) => shown.has(cell));
}

export function stepsGrid(slowdowns: Slowdowns, ranks: readonly RankView[]): Grid {
  const shown = cellsOverSteps(slowdowns);
  return {
    rows: shown.map((cell) => `${stageName(cell, ranks)} · ${cell.replica}`),
    columns: slowdowns.steps.map(String),
    values: shown.map(({ steps }) => steps),
  };
}

export function slowFacts(slowdowns: Slowdowns): (readonly [string, string])[] {
  const { slowdown, slowestFraction, lastStageFraction, launchRatio, kinds, recordedSeconds, idealSeconds } =
    slowdowns;
  const mean = (values: readonly number[]): number =>
    values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);
  const [kind] = Object.entries(kinds);
  return [
    ["Step", `${seconds(mean(recordedSeconds))}, ${seconds(mean(idealSeconds))} if nothing were slow`],
    ["Slowdown of the job", ratio(slowdown)],
    ["GPU time lost", slowdown === null ? ABSENT : percent(Math.max(0, 1 - 1 / slowdown))],
    ["Of it by the slowest 3 % of cells", percent(slowestFraction)],
    ["Of it by the last stage", percent(lastStageFraction)],
    ["Launch delays make steps", launchRatio === null ? ABSENT : `${ratio(launchRatio)} as long`],
    [
      "Most of it in",
      kind && kind[1] > 1.005 ? `${kind[0].replaceAll("_", " ")} (${ratio(kind[1])})` : ABSENT,
    ],
  ];
}

/** GPU-hours that a verdict has cost, where every rank waits for the slowest. */
export function gpuHours(verdict: Verdict, world: number): number {
  return verdict.effect.gpuHours ?? ((verdict.effect.secondsLost ?? 0) * world) / 3600;
}

export const gpuHoursText = (hours: number): string =>
  hours === 0 ? ABSENT : hours < 0.01 ? "< 0.01" : hours < 10 ? hours.toFixed(2) : compact(hours);

/** Digits after the point as a price has them; the currency is that of the manifest. */
export const moneyText = (amount: number): string => (amount < 100 ? amount.toFixed(2) : compact(amount));

export interface SuspectRow {
  readonly id: string;
  readonly rank: number | null;
  readonly step: number | null;
  readonly cells: readonly string[];
}

/** `price` of a GPU-hour: with it the column Cost. */
export const suspectColumns = (price: number | null): string[] => [
  "Subject",
  "Cause",
  "State",
  "Confidence",
  "On every step",
  "GPU-hours",
  ...(price === null ? [] : ["Cost"]),
  "Since",
];

export function suspectRows(
  verdicts: readonly Verdict[],
  world: number,
  price: number | null = null,
): SuspectRow[] {
  return verdicts.map((verdict) => {
    const hours = gpuHours(verdict, world);
    const until = verdict.until ? ` to ${verdict.until.step}` : "";
    return {
      id: verdict.id,
      rank: verdict.subject.ranks.at(-1) ?? null,
      step: verdict.evidence.steps.at(-1) ?? null,
      cells: [
        subjectName(verdict),
        causeName(verdict),
        stateName(verdict),
        percent(verdict.confidence),
        verdict.cause === "hang" ? ABSENT : `+${seconds(verdict.effect.secondsPerStep)}`,
        gpuHoursText(hours),
        ...(price === null ? [] : [moneyText(hours * price)]),
        `step ${verdict.since.step}${until}, ${clock(verdict.since.time)}`,
      ],
    };
  });
}

/** Ranks of a matrix of links at most; above it the links are listed only. */
export const MOST_LINKED = 64;

/** Median deliveries from ranks (rows) to ranks; null where there are too many, or no messages. */
export function linkGrid(links: readonly SlowLink[]): Grid | null {
  const ranks = [...new Set(links.flatMap(({ source, destination }) => [source, destination]))].sort(
    (left, right) => left - right,
  );
  if (ranks.length === 0 || ranks.length > MOST_LINKED) return null;
  const value = new Map(links.map((link) => [`${link.source} ${link.destination}`, link.seconds]));
  const names = ranks.map((rank) => `rank ${rank}`);
  return {
    rows: names,
    columns: ranks.map(String),
    values: ranks.map((source) => ranks.map((to) => value.get(`${source} ${to}`) ?? null)),
  };
}

export const LINK_COLUMNS = [
  "Link",
  "Slowdown",
  "Median delivery",
  "Beyond the others",
  "Messages",
  "Between",
];

export const linkCells = ({
  source,
  destination,
  seconds: median,
  usualSeconds,
  messages,
  crossesNodes,
  slowdown,
}: SlowLink): string[] => [
  `${source} → ${destination}`,
  ratio(slowdown),
  seconds(median),
  median > usualSeconds ? `+${seconds(median - usualSeconds)}` : ABSENT,
  integer(messages),
  crossesNodes ? "nodes" : "ranks of a node",
];
