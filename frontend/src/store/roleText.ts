/** MegaFBD as rows and sentences: what is shipped, how the roles are balanced, what each mode costs. */
import type { ForwardBackward, RoleView } from "../api/types";
import { ABSENT, bytes, integer, percent, seconds } from "./format";

const SHIPPED: Readonly<Record<ForwardBackward["ship"], string>> = {
  saved: "all that autograd saves",
  selective: "the same without what core attention saves, which is recomputed",
  full: "inputs of layers, which are recomputed",
};

/** Facts that the reporting rank has published, each with its name. */
export function shipFacts(state: ForwardBackward): (readonly [string, string])[] {
  const count = state.backwardPerForward;
  const served = state.merged
    ? "a tensor group"
    : `${integer(count)} ${count === 1 ? "replica" : "replicas"}`;
  const advised = state.advisedBackwardPerForward ?? null;
  return [
    ["Mode", `${state.ship}: ${SHIPPED[state.ship]}`],
    ["Chosen by", state.chosen ? "measured times of the modes" : "the configuration"],
    ["In force", `since step ${state.fromStep}`],
    ["A forward rank serves", served],
    ["Shipped for a microbatch", bytes(state.shipBytes)],
    ["Time to ship it", seconds(state.shipSeconds ?? null)],
    ...(advised === null ? [] : [["Advised backward per forward", integer(advised)] as const]),
  ];
}

export interface ModeRow {
  readonly name: string;
  readonly size: string;
  readonly step: string;
  readonly inForce: boolean;
}

/** Modes with the bytes of a microbatch, and the measured time of a step where there is one. */
export function modeRows(state: ForwardBackward): ModeRow[] {
  return (state.modes ?? []).map((mode) => ({
    name: mode.ship,
    size: bytes(mode.shipBytes),
    step: seconds(mode.stepSeconds ?? null),
    inForce: mode.ship === state.ship,
  }));
}

export interface RoleRow {
  readonly role: RoleView["role"];
  readonly ranks: string;
  readonly passes: string;
  readonly wait: string;
  readonly busy: string;
  /** Width of a bar. */
  readonly share: number;
}

const AWAITS: Readonly<Record<RoleView["role"], string>> = { forward: "credits", backward: "shipments" };
const PASSES: Readonly<Record<RoleView["role"], string>> = { forward: "F", backward: "B + W" };

/** Both roles: share of time in which they are busy, passes of a microbatch, waits of a step. */
export function roleRows(roles: readonly RoleView[]): RoleRow[] {
  return roles.map((view) => ({
    role: view.role,
    ranks: `${integer(view.ranks.length)} ${view.role} ${view.ranks.length === 1 ? "rank" : "ranks"}`,
    passes: `${PASSES[view.role]} ${seconds(view.passSeconds)}`,
    wait: view.waitSeconds === null ? ABSENT : `${seconds(view.waitSeconds)} for ${AWAITS[view.role]}`,
    busy: percent(view.busy),
    share: view.busy ?? 0,
  }));
}

/** Rank, role, share of time in which it is busy, passes of a microbatch, waits of a step; forward ranks first. */
export function rankCells(roles: readonly RoleView[], row: number): string[] {
  let at = row;
  for (const view of roles) {
    const rank = view.ranks[at];
    if (rank !== undefined)
      return [
        `rank ${rank}`,
        view.role,
        percent(view.rankBusy[at]),
        seconds(view.rankPassSeconds[at]),
        seconds(view.rankWaitSeconds[at]),
      ];
    at -= view.ranks.length;
  }
  return [];
}
