/** Control of a training from this page: takes the lease with the first order, renews it, and gives it back. */
import { onBeforeUnmount, onMounted, ref } from "vue";
import { asApiError, errorText, type ApiClient } from "../../../api/client";
import type { LeaseGrant, LeaseRequest, OrderRequest } from "../../../api/types";

const RENEW_MS = 10_000;
const LOST = new Set(["lease-lost", "no-lease"]);

export type ControlClient = Pick<ApiClient, "controlTraining" | "orderTraining">;
export type OrderKind = OrderRequest["kind"];

export function useTrainingControl(client: ControlClient) {
  /** Key of the lease while this page has it. */
  const key = ref<string | null>(null);
  const problem = ref<string | null>(null);
  const busy = ref(false);

  async function attempt(action: () => Promise<void>): Promise<void> {
    if (busy.value) return;
    busy.value = true;
    problem.value = null;
    try {
      await action();
    } catch (error) {
      const found = asApiError(error);
      if (LOST.has(found.code ?? "")) key.value = null;
      problem.value = errorText(found);
    } finally {
      busy.value = false;
    }
  }

  const lease = (action: LeaseRequest["action"], held: string | null, force = false): Promise<LeaseGrant> =>
    client.controlTraining({ action, key: held, client: "page", force });

  async function acquire(force: boolean): Promise<string> {
    if (key.value !== null) return key.value;
    const taken = await lease("take", null, force);
    key.value = taken.key;
    return taken.key ?? "";
  }

  const takeOver = (): Promise<void> =>
    attempt(async () => {
      key.value = null;
      await acquire(true);
    });

  const order = (kind: OrderKind, fields: Partial<OrderRequest> = {}): Promise<void> =>
    attempt(async () => {
      const held = await acquire(false);
      await client.orderTraining({ lease: held, kind, steps: null, every: null, id: null, ...fields });
    });

  const release = (): Promise<void> =>
    attempt(async () => {
      const held = key.value;
      if (held === null) return;
      key.value = null;
      await lease("release", held);
    });

  /** A page that is not seen gives the control up: nobody would notice that it holds GPUs. */
  const renew = (): void => {
    const held = key.value;
    if (held === null || document.visibilityState === "hidden" || busy.value) return;
    void attempt(async () => void (await lease("renew", held)));
  };

  let timer: ReturnType<typeof setInterval> | undefined;
  onMounted(() => (timer = setInterval(renew, RENEW_MS)));
  onBeforeUnmount(() => {
    clearInterval(timer);
    void release();
  });

  return { key, problem, busy, order, takeOver, release };
}
