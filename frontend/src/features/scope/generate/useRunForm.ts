/** Request for the next run, and actions on runs; shared by the controls and the panels that pin. */
import { computed, inject, provide, reactive, ref, shallowRef, type InjectionKey } from "vue";
import { asApiError, type ApiError } from "../../../api/client";
import {
  DEFAULT_CAPTURE,
  DEFAULT_SAMPLING,
  isActive,
  type Capture,
  type Head,
  type RunHeader,
  type RunRequest,
} from "../../../scope/protocol";
import { problemPlaces } from "../../../scope/problems";
import { useScope, type ScopeApi } from "../useScope";
import { draftOf, perturbationField } from "./perturbation";
import { markVisited } from "../firstVisit";
import { useSelection } from "../../../composables/useSelection";

type Writable<T> = { -readonly [K in keyof T]: T[K] extends object ? Writable<T[K]> : T[K] };

const STORAGE_KEY = "megatronapp-scope-form";
const DEFAULT_TOKENS = 32;

function initial() {
  return {
    prompts: ["The quick brown fox jumps over"],
    tokens: DEFAULT_TOKENS,
    sampling: { ...DEFAULT_SAMPLING, stop: [] as string[] },
    capture: structuredClone(DEFAULT_CAPTURE) as Writable<Capture>,
    perturbation: draftOf({}),
  };
}
type Draft = ReturnType<typeof initial>;

/** Request of the last run of this tab; an unreadable entry is ignored. */
function stored(): Draft {
  try {
    const { prompts, tokens, sampling } = JSON.parse(
      sessionStorage.getItem(STORAGE_KEY) ?? "{}",
    ) as Partial<Draft>;
    const known = Array.isArray(prompts) && prompts.every((text) => typeof text === "string");
    const counted = typeof tokens === "number" && Array.isArray(sampling?.stop);
    return known && prompts.length > 0 && counted
      ? { ...initial(), prompts, tokens, sampling: { ...initial().sampling, ...sampling } }
      : initial();
  } catch {
    return initial();
  }
}

/** Request of a run, with the seed that it got. */
export function settingsOf({ prompts = [], tokens, sampling, capture, ...header }: RunHeader): Draft {
  const fresh = initial();
  return {
    prompts: prompts.map(({ text }) => text),
    tokens: tokens ?? fresh.tokens,
    sampling: { ...fresh.sampling, ...sampling, stop: [...(sampling?.stop ?? [])] },
    capture: structuredClone({ ...fresh.capture, ...capture }) as Writable<Capture>,
    perturbation: draftOf(header),
  };
}

const requestOf = ({ prompts, tokens, sampling, capture, perturbation }: Draft): RunRequest => ({
  prompts,
  tokens,
  sampling,
  capture: capture as Capture,
  ...perturbationField(perturbation),
});

const sameHead = (a: Head, b: Head): boolean => a.layer === b.layer && a.head === b.head;
const toggled = (pinned: readonly Head[], head: Head): Head[] => {
  const others = pinned.filter((one) => !sameHead(one, head));
  return others.length < pinned.length ? others : [...pinned, { ...head }];
};
/** Of now: what is sent does not follow the fields. */
const copied = (capture: Writable<Capture>): Capture => JSON.parse(JSON.stringify(capture)) as Capture;

/** Capture that was requested of a run whose header had another one then. */
interface Sent {
  readonly run: string;
  readonly before: RunHeader["capture"];
  readonly capture: Capture;
}

/** What is captured of the active run, and its changes. */
function createCapture(
  scope: ScopeApi,
  draft: Draft,
  attempt: (action: () => Promise<void>) => Promise<void>,
) {
  const active = computed(() => {
    const header = scope.version.value >= 0 ? scope.run.value?.header : undefined;
    return header && isActive(header.state) ? header : null;
  });
  const running = computed(() => active.value?.run ?? null);
  const sent = shallowRef<Sent | null>(null);
  /** Capture of an active run; until its next header the one that was sent, so that quick presses add up. */
  function captureOf({ run, capture }: RunHeader): Capture {
    if (sent.value?.run === run && sent.value.before === capture) return sent.value.capture;
    return capture ? { ...DEFAULT_CAPTURE, ...capture } : copied(draft.capture);
  }
  /** Pinned heads of the active run; while there is none, those of the next one. */
  const pinned = computed<readonly Head[]>(
    () => (active.value ? captureOf(active.value) : draft.capture).pinned,
  );

  async function send({ run, capture: before }: RunHeader, capture: Capture): Promise<void> {
    const mine = (sent.value = { run, before, capture });
    try {
      await scope.client.setCapture(run, capture);
    } catch (error) {
      if (sent.value === mine) sent.value = null;
      throw error;
    }
  }
  /** Changes of the capture take effect with the next step. */
  const applyCapture = async (): Promise<void> => {
    const { value: run } = active;
    if (run === null) return;
    const form = copied(draft.capture);
    // One run shows q and k in one way: else pixels from before and after the rotation would be shown together.
    const { rotary, pinned: ofRun } = captureOf(run);
    // No field shows the pins of a run, so that none takes them away, but the other presets send no rows.
    await attempt(() => send(run, { ...form, rotary, pinned: form.preset === "default" ? ofRun : [] }));
  };
  /** Pin or unpin a head; of an active run nothing else changes, whatever the fields say. */
  async function pin(head: Head): Promise<void> {
    const { value: run } = active;
    if (run === null) {
      draft.capture.pinned = toggled(draft.capture.pinned, head);
      return;
    }
    const capture = captureOf(run);
    const next = toggled(capture.pinned, head);
    await attempt(async () => {
      await send(run, { ...capture, pinned: next });
      // The next run has this head as this one does, unless its preset sends no rows.
      const others = draft.capture.pinned.filter((one) => !sameHead(one, head));
      const has = draft.capture.preset === "default" && next.length > capture.pinned.length;
      draft.capture.pinned = has ? [...others, { ...head }] : others;
    });
  }
  return { running, applyCapture, pinned, pin };
}

function createForm() {
  const scope = useScope();
  const { select } = useSelection();
  const draft = reactive(stored());
  const problem = shallowRef<ApiError | null>(null);
  const busy = ref(false);
  const places = computed(() => problemPlaces(problem.value));

  async function attempt(action: () => Promise<void>): Promise<void> {
    [busy.value, problem.value] = [true, null];
    try {
      await action();
    } catch (error) {
      problem.value = asApiError(error);
    }
    busy.value = false;
  }
  const capture = createCapture(scope, draft, attempt);
  return {
    draft,
    problem,
    places,
    busy,
    ...capture,
    generate: () =>
      attempt(async () => {
        const { prompts, tokens, sampling } = draft;
        sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ prompts, tokens, sampling }));
        markVisited();
        const { run } = await scope.client.start(requestOf(draft));
        select({ run, prompt: 0, token: null });
      }),
    /** Fill the form with the settings of the run that is shown: with the same seed it gives the same tokens. */
    takeSettings: () => {
      const shown = scope.run.value?.header;
      if (shown?.prompts?.length) Object.assign(draft, settingsOf(shown));
    },
    stop: () =>
      attempt(async () => {
        const { value: run } = capture.running;
        if (run !== null) await scope.client.stop(run);
      }),
  };
}

export type RunForm = ReturnType<typeof createForm>;

const KEY: InjectionKey<RunForm> = Symbol("run form");

export function provideRunForm(): RunForm {
  const form = createForm();
  provide(KEY, form);
  return form;
}

export function useRunForm(): RunForm {
  const form = inject(KEY);
  if (!form) throw new Error("useRunForm outside of a scope screen");
  return form;
}
