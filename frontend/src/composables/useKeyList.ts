/** Keys of the screen that is shown, for the list behind `?`. */
import { onBeforeUnmount, shallowRef } from "vue";

export type KeyMeaning = readonly [string, string];

/** null: the keys of a job's page. */
export const screenKeys = shallowRef<readonly KeyMeaning[] | null>(null);

export function useKeyList(keys: readonly KeyMeaning[]): void {
  screenKeys.value = keys;
  onBeforeUnmount(() => (screenKeys.value = null));
}
