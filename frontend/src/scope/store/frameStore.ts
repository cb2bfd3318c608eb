/** Contents of all frames of runs, in typed arrays and outside of reactivity; `version` counts the changes. */
import { FrameError, type Frame } from "../../wire/frames";
import { SampleStore } from "./sampleStore";
import {
  ScopeFrame,
  type AxesSource,
  type Gap,
  type OverviewHeader,
  type PcaHeader,
  type RowsHeader,
  type RunHeader,
  type StepHeader,
} from "../protocol";
import { FITTED, pcaTable } from "./pcaTables";
import { readTensors, type Tensor } from "../tensors/tensors";

/** Numbers that a run may keep in the page; beyond it the oldest are dropped, and their cells are hatched. */
export const RUN_BYTES = 40 << 20;
/** Runs whose numbers are kept, the one that is shown among them. */
export const KEPT_RUNS = 2;
const KEPT_GAPS = 100;

export interface Pca {
  readonly version: number;
  readonly layers: readonly number[];
  readonly fitted: string;
  readonly sources: readonly AxesSource[];
}

export class RunStore {
  header: RunHeader;
  readonly samples: SampleStore[] = [];
  readonly gaps: Gap[] = [];
  /** Texts of candidates by their id, each decoded alone. */
  readonly candidates = new Map<number, string>();
  pca: Pca | null = null;
  seq = 0;
  /** Whether the run is here from its first frame on. */
  whole = false;
  version = 0;

  constructor(run: string) {
    this.header = { run, state: "queued" };
  }

  sample(index: number): SampleStore {
    if (!Number.isInteger(index) || index < 0 || index > 4096)
      throw new FrameError(`${index} is no number of a prompt`);
    while (this.samples.length <= index) this.samples.push(new SampleStore());
    return this.samples[index] as SampleStore;
  }

  setHeader(header: RunHeader): void {
    this.header = { ...this.header, ...header };
    header.prompts?.forEach((prompt, index) => this.sample(index).setPrompt(prompt));
  }

  addStep(header: StepHeader, tensors: ReadonlyMap<string, Tensor>): void {
    const rows = this.keepPca(tensors, header.pcaVersion);
    this.addTexts(header.topTexts, tensors.get("top.id"));
    header.rows.forEach(([sample, position], index) => {
      const store = this.sample(sample);
      const id = header.ids[index];
      const finished = header.finished?.[index] ?? null;
      if (finished !== null) store.finished = finished;
      if (id !== undefined)
        store.setToken(position + 1, id, header.texts[index] ?? "", header.offsets?.[index] ?? null);
      for (const tensor of rows) store.setRow(tensor, index, position);
    });
    this.keepSmall();
  }

  /** Coordinates go to the table of their basis: those of different bases do not fit into one picture. */
  private keepPca(tensors: ReadonlyMap<string, Tensor>, given: number | undefined): Tensor[] {
    const version = given ?? (this.pca?.fitted === "refit" ? undefined : this.pca?.version);
    const outdated = version === undefined || version < (this.pca?.version ?? 0);
    return [...tensors.values()].flatMap((tensor) => {
      if (tensor.name !== "pca") return [tensor];
      return outdated ? [] : [{ ...tensor, name: pcaTable(version) }];
    });
  }

  private addTexts(texts: StepHeader["topTexts"], ids: Tensor | undefined): void {
    const each = ids?.shape[1] ?? 0;
    texts?.forEach((row, at) =>
      row.slice(0, each).forEach((text, index) => {
        const id = ids?.data[at * each + index];
        if (id !== undefined) this.candidates.set(id, text);
      }),
    );
  }

  addOverview(header: OverviewHeader, tensors: ReadonlyMap<string, Tensor>, positions: unknown): void {
    const store = this.sample(header.sample);
    if (header.stride !== undefined) store.stride = Math.max(1, header.stride);
    this.addTexts(header.topTexts, tensors.get("top.id"));
    for (const tensor of this.keepPca(tensors, header.pcaVersion)) {
      if (tensor.name === "atlas") {
        const [layers = 0, heads = 0, edge = 0] = tensor.shape;
        store.atlas = { layers, heads, edge, values: new Uint8Array(tensor.data) };
        continue;
      }
      for (let index = 0; index < (tensor.shape[0] ?? 0); index += 1) {
        const position = Array.isArray(positions) ? Number(positions[index]) : index * store.stride;
        store.setRow(tensor, index, position);
      }
    }
  }

  addRows(header: RowsHeader, tensors: ReadonlyMap<string, Tensor>): void {
    const values = tensors.get("attention")?.data;
    if (!(values instanceof Uint8Array)) return;
    let at = 0;
    header.rows.forEach(([sample, layer, head, position], index) => {
      const keys = header.keys[index] ?? 0;
      this.sample(sample).setAttention(layer, head, position, values.subarray(at, at + keys));
      at += keys;
    });
    this.keepSmall();
  }

  setPca(header: PcaHeader, tensors: ReadonlyMap<string, Tensor>): void {
    const { version, layers, fitted, sources = [] } = header;
    const before = this.pca?.version;
    if (version < (before ?? 0)) return;
    this.pca = { version, layers, fitted, sources };
    // A later frame of the same version has more rows of a long run; another one takes the place of all.
    const mine = pcaTable(version);
    if (version !== before)
      for (const sample of this.samples)
        sample.dropTables((name) => name.startsWith("pca.") && name !== mine);
    const tensor = tensors.get("pca");
    if (!tensor) return;
    const exact = { ...tensor, name: FITTED };
    header.rows.forEach(([sample, position], index) => this.sample(sample).setRow(exact, index, position));
  }

  addGap(gap: Gap): void {
    this.gaps.push(gap);
    if (this.gaps.length > KEPT_GAPS) this.gaps.shift();
  }

  private keepSmall(): void {
    const size = (): number => this.samples.reduce((sum, sample) => sum + sample.bytes, 0);
    while (size() > RUN_BYTES) {
      const dropped = this.samples.map((sample) => sample.dropOldest());
      if (!dropped.includes(true)) return;
    }
  }
}

const RUN_FRAMES: ReadonlySet<number> = new Set([
  ScopeFrame.RUN,
  ScopeFrame.STEP,
  ScopeFrame.OVERVIEW,
  ScopeFrame.ROWS,
  ScopeFrame.GAP,
  ScopeFrame.PCA,
]);

export class FrameStore {
  version = 0;
  /** By id, the newest at the end. */
  readonly runs = new Map<string, RunStore>();
  /** The run that is shown: its numbers are never dropped. */
  selected: string | null = null;
  /** The run that it is compared with: never dropped, either. */
  compared: string | null = null;
  /** Runs whose numbers were dropped to free memory. */
  readonly forgotten = new Set<string>();

  /** Takes a frame of a run; returns false for other frames, which are the caller's. Throws FrameError. */
  take(frame: Frame): boolean {
    if (!RUN_FRAMES.has(frame.type)) return false;
    const { run, seq } = frame.header;
    if (typeof run !== "string") {
      if (frame.type === ScopeFrame.GAP) return false;
      throw new FrameError(`a frame of type ${frame.type} names no run`);
    }
    const store = this.run(run);
    if (typeof seq === "number") {
      store.whole ||= store.seq === 0 && seq === 1;
      store.seq = Math.max(store.seq, seq);
    }
    this.apply(store, frame);
    store.version += 1;
    this.version += 1;
    return true;
  }

  /** Frame of a run after which to request more from the hub; 0 for a run of which only a part is here. */
  resumeAt(run: string): number {
    const known = this.runs.get(run);
    if (known && !known.whole) {
      known.gaps.length = 0;
      known.whole = true;
      return 0;
    }
    return known?.seq ?? 0;
  }

  /** The hub was restarted: it numbers frames from 1 again, so all frames of each run are requested. */
  hubBegan(): void {
    for (const run of this.runs.values()) {
      run.seq = 0;
      run.whole = true;
    }
  }

  private apply(store: RunStore, frame: Frame): void {
    const header = frame.header as unknown;
    switch (frame.type) {
      case ScopeFrame.RUN:
        return store.setHeader(header as RunHeader);
      case ScopeFrame.STEP:
        return store.addStep(header as StepHeader, readTensors(frame));
      case ScopeFrame.OVERVIEW:
        return store.addOverview(header as OverviewHeader, readTensors(frame), frame.header["positions"]);
      case ScopeFrame.ROWS:
        return store.addRows(header as RowsHeader, readTensors(frame));
      case ScopeFrame.PCA:
        return store.setPca(header as PcaHeader, readTensors(frame));
      default:
        return store.addGap(header as Gap);
    }
  }

  private run(id: string): RunStore {
    const known = this.runs.get(id);
    if (known) return known;
    const fresh = new RunStore(id);
    this.forgotten.delete(id);
    const others = [...this.runs.keys()].filter(
      (other) => other !== this.selected && other !== this.compared,
    );
    for (const oldest of others.slice(0, this.runs.size + 1 - KEPT_RUNS)) {
      this.runs.delete(oldest);
      this.forgotten.add(oldest);
    }
    this.runs.set(id, fresh);
    return fresh;
  }
}
