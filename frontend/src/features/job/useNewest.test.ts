import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { effectScope, nextTick, ref } from "vue";
import { useNewest } from "./useNewest";

beforeEach(() => vi.useFakeTimers());
afterEach(() => vi.useRealTimers());

test("a slow hub has one request at a time, and the newest step is asked for after its answer", async () => {
  const newest = ref("1");
  const answers: ((view: string) => void)[] = [];
  const signals: AbortSignal[] = [];
  const scope = effectScope();
  const source = scope.run(() =>
    useNewest(
      (signal) => {
        signals.push(signal);
        return new Promise<string>((resolve) => answers.push(resolve));
      },
      () => newest.value,
    ),
  );
  for (const step of ["2", "3", "4"]) {
    newest.value = step;
    await nextTick();
    await vi.advanceTimersByTimeAsync(5000);
  }
  expect(signals.map((signal) => signal.aborted)).toEqual([false]);
  answers[0]?.("first");
  await vi.advanceTimersByTimeAsync(0);
  expect(source?.state.value).toEqual({ kind: "ready", view: "first" });
  expect(answers).toHaveLength(2);
  answers[1]?.("second");
  await vi.advanceTimersByTimeAsync(5000);
  expect(source?.state.value).toEqual({ kind: "ready", view: "second" });
  expect(answers).toHaveLength(2);
  scope.stop();
});
