/** Sites that modules of users registered (docs/scope.md), and their tensors of one token. */
import { BUILT_IN_SITES } from "../builtInSites";
import { numbersAt, shownFor, type Strip } from "./matrices";
import type { SampleStore } from "../store/sampleStore";

/** Sites that plugins registered. */
export const pluginSites = (sites: readonly string[] | undefined): string[] =>
  (sites ?? []).filter((name) => !BUILT_IN_SITES.has(name));

export interface PluginStrip {
  readonly name: string;
  readonly site: string;
  /** Whose numbers these are: of a long prompt the selected token may have none. */
  readonly position: number;
  /** Whether each layer has the site. */
  readonly layered: boolean;
  readonly strip: Strip;
}

/** What steps hold of these sites for the token at a position: one strip for each reducer. */
export function pluginStrips(sample: SampleStore, sites: readonly string[], position: number): PluginStrip[] {
  return sample.tableNames().flatMap((name) => {
    const site = sites.find((one) => name === one || name.startsWith(`${one}.`));
    const at = site === undefined ? null : shownFor(sample, name, position);
    const values = at === null ? undefined : numbersAt(sample, name, at);
    if (site === undefined || at === null || !values) return [];
    const [layers = 1, pixels] = sample.shapeOf(name);
    const layered = pixels !== undefined;
    const strip = layered ? { layers, pixels, values } : { layers: 1, pixels: layers, values };
    return [{ name, site, position: at, layered, strip }];
  });
}
