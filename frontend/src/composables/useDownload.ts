/** Saves numbers and pictures as files; says while they are brought, and why they do not come. */
import { onBeforeUnmount, ref } from "vue";
import { asApiError, isAbort } from "../api/client";

/** Browsers read the file after the click. */
const KEEP_MS = 30_000;

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEEP_MS);
}

export function useDownload() {
  const busy = ref<string | null>(null);
  const problem = ref<string | null>(null);
  let pending: AbortController | undefined;

  async function download(name: string, make: (signal: AbortSignal) => Promise<Blob | null>): Promise<void> {
    pending?.abort();
    const { signal } = (pending = new AbortController());
    [busy.value, problem.value] = [name, null];
    try {
      const blob = await make(signal);
      if (blob) save(blob, name);
    } catch (error) {
      if (isAbort(error)) return;
      const { message, hint } = asApiError(error);
      problem.value = `${name}: ${message} ${hint}`;
    } finally {
      if (!signal.aborted) busy.value = null;
    }
  }

  onBeforeUnmount(() => pending?.abort());
  return { busy, problem, download };
}

/** What a canvas shows, as a picture. */
export const pictureOf = async (canvas: HTMLCanvasElement | null | undefined): Promise<Blob | null> =>
  new Promise((resolve) => (canvas ? canvas.toBlob(resolve, "image/png") : resolve(null)));
