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
import { useScope } from "../useScope";
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

function createForm() {
  const scope = useScope();
  const { select } = useSelection();
  const draft = reactive(stored());
  const problem = shallowRef<ApiError | null>(null);
  const busy = ref(false);
  const places = computed(() => problemPlaces(problem.value));
  const running = computed(() => {
    const run = scope.version.value >= 0 ? scope.run.value : null;
    return run && isActive(run.header.state) ? run.header.run : null;
  });

  async function attempt(action: () => Promise<void>): Promise<void> {
    [busy.value, problem.value] = [true, null];
    try {
      await action();
    } catch (error) {
      problem.value = asApiError(error);
    }
    busy.value = false;
  }
  /** Changes of the capture take effect with the next step. */
  const applyCapture = async (): Promise<void> => {
    const { value: run } = running;
    if (run === null) return;
    // One run shows q and k in one way: else pixels from before and after the rotation would be shown together.
    const { rotary = draft.capture.rotary } = scope.run.value?.header.capture ?? {};
    await attempt(() => scope.client.setCapture(run, { ...(draft.capture as Capture), rotary }));
  };
  return {
    draft,
    problem,
    places,
    busy,
    running,
    applyCapture,
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
        if (running.value !== null) await scope.client.stop(running.value);
      }),
    pinned: computed(() => draft.capture.pinned as readonly Head[]),
    /** Pin or unpin a head. */
    pin: async (head: Head): Promise<void> => {
      const { pinned } = draft.capture;
      const others = pinned.filter((one) => !sameHead(one, head));
      draft.capture.pinned = others.length < pinned.length ? others : [...pinned, { ...head }];
      await applyCapture();
    },
    isPinned: (head: Head): boolean => draft.capture.pinned.some((one) => sameHead(one, head)),
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
