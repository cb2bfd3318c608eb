/** Saves values and pictures as files, with progress and errors. */
import { onBeforeUnmount, ref } from "vue";
import { asApiError, errorText, isAbort } from "../../../api/client";
import { panelPicture } from "../../../render/panelPicture";

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
      problem.value = `${name}: ${errorText(asApiError(error))}`;
    } finally {
      if (!signal.aborted) busy.value = null;
    }
  }

  onBeforeUnmount(() => pending?.abort());
  return { busy, problem, download };
}

/** A panel as a picture. */
export const pictureOf = async (panel: Element | null): Promise<Blob | null> =>
  new Promise((resolve) => (panel ? panelPicture(panel).toBlob(resolve, "image/png") : resolve(null)));
