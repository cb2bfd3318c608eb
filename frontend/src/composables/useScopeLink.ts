/** Whether the hub has a model that can be looked at; asked once, by pages that lead to the scope screen. */
import { ref, type Ref } from "vue";
import type { ApiClient } from "../api/client";

export function useScopeLink(api: ApiClient): Ref<boolean> {
  const found = ref(false);
  api.send(`${api.root}scope`, {}).then(
    () => (found.value = true),
    () => undefined,
  );
  return found;
}
