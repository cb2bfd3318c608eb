/** Which rank holds what: pipeline stages share the layers, tensor ranks the heads. */
import type { Head, Hello, Layout, RankShare, Span } from "./protocol";

type Model = Pick<Hello["model"], "layers" | "heads">;
export type Range = Span;
export type Shard = RankShare;

const part = (size: number, index: number, count: number): Range => [
  Math.floor((size * index) / count),
  Math.floor((size * (index + 1)) / count),
];
const within = (value: number, [first, end]: Range): boolean => value >= first && value < end;

/** All ranks of one replica, as they reported themselves; else in even parts, ranks counted tensor first. */
export function shards({ layers, heads }: Model, { tensor, pipeline, ranks }: Layout): Shard[] {
  if (ranks?.length) return [...ranks];
  return Array.from({ length: tensor * pipeline }, (_, rank) => {
    const [stage, shard] = [Math.floor(rank / tensor), rank % tensor];
    return {
      rank,
      stage,
      tensor: shard,
      layers: part(layers, stage, pipeline),
      heads: part(heads, shard, tensor),
    };
  });
}

/** The rank that holds a head. */
export const ownerOf = (all: readonly Shard[], { layer, head }: Head): Shard | undefined =>
  all.find((one) => within(layer, one.layers) && within(head, one.heads));

/** The head of a rank that is nearest to this one. */
export function nearestHead({ layers, heads }: Shard, { layer, head }: Head): Head {
  const into = (value: number, [first, end]: Range): number =>
    Math.min(Math.max(value, first), Math.max(first, end - 1));
  return { layer: into(layer, layers), head: into(head, heads) };
}

const span = ([first, end]: Range): string => (end - first === 1 ? `${first}` : `${first} to ${end - 1}`);
const named = (one: string, range: Range): string =>
  `${one}${range[1] - range[0] === 1 ? "" : "s"} ${span(range)}`;

export const shardTitle = ({ rank, layers, heads }: Shard): string =>
  `${rank}: ${named("layer", layers)}, ${named("head", heads)}`;

export const shardPlace = ({ rank, stage, tensor }: Shard): string =>
  `rank ${rank} (stage ${stage}, tensor rank ${tensor})`;
