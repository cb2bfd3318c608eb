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

test("an error replaces the answer to another question, and no other answer", async () => {
  const newest = ref("1");
  const answers: { resolve: (view: string) => void; reject: (error: Error) => void }[] = [];
  const scope = effectScope();
  const source = scope.run(() =>
    useNewest(
      (signal) =>
        new Promise<string>((resolve, reject) => {
          answers.push({ resolve, reject });
          signal.addEventListener("abort", () => reject(new DOMException("aborted", "AbortError")));
        }),
      () => newest.value,
    ),
  );
  const failing = async (): Promise<string | undefined> => {
    answers.at(-1)?.reject(new Error("refused"));
    await vi.advanceTimersByTimeAsync(0);
    return source?.state.value.kind;
  };
  answers[0]?.resolve("first");
  await vi.advanceTimersByTimeAsync(5000);
  newest.value = "2";
  await nextTick();
  expect(await failing()).toBe("ready");
  source?.refresh();
  expect(await failing()).toBe("ready");

  newest.value = "3";
  await nextTick();
  source?.reload();
  await vi.advanceTimersByTimeAsync(5000);
  expect(answers).toHaveLength(4);
  expect(await failing()).toBe("error");

  newest.value = "4";
  await nextTick();
  await vi.advanceTimersByTimeAsync(5000);
  answers.at(-1)?.resolve("second");
  await vi.advanceTimersByTimeAsync(0);
  expect(source?.state.value).toEqual({ kind: "ready", view: "second" });
  scope.stop();
});
