import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { defineComponent, h } from "vue";
import { ApiClient } from "../../../api/client";
import { provideJob } from "../../../composables/useJob";
import { useSelection } from "../../../composables/useSelection";
import StoredHours from "./StoredHours.vue";
import { historyText, hourChoices, hourText, type History } from "./storedHours";

const hour = { attempt: 1, records: 1000, bytes: 1 << 20 };
const HISTORY: History = {
  hours: [
    { ...hour, hour: "2026-11-28T21", attempt: 0, firstStep: 0, lastStep: 90 },
    { ...hour, hour: "2026-11-28T22", firstStep: 50, lastStep: 1200 },
    { ...hour, hour: "2026-11-28T23", firstStep: 1201, lastStep: 2400 },
    { ...hour, hour: "2026-11-29T00", firstStep: null, lastStep: null },
  ],
  bytes: 4 << 20,
  limitBytes: 2 ** 30,
  waitingSegments: 0,
  dropped: { files: 0, records: 0, bytes: 0, until: null },
  damagedFiles: 0,
  memory: { steps: 5, firstStep: 2396, lastStep: 2400 },
};

class SilentSocket {
  close(): void {
    return undefined;
  }
}
beforeEach(() => vi.stubGlobal("WebSocket", SilentSocket));
afterEach(() => vi.unstubAllGlobals());

async function shown(history: History | null): Promise<VueWrapper> {
  const client = new ApiClient((input) =>
    String(input) === "api/v1/history" && history
      ? Promise.resolve(Response.json(history))
      : Promise.resolve(Response.json({ message: "no such route" }, { status: 404 })),
  );
  const page = mount(
    defineComponent(() => {
      provideJob(client);
      return () => h(StoredHours);
    }),
  );
  await flushPromises();
  return page;
}

describe("stored hours", () => {
  it("say how far back spans are stored, and what was deleted", () => {
    expect(historyText(HISTORY)).toBe(
      `Spans are stored since ${hourText("2026-11-28T21")} (4.00 MiB of 1.00 GiB).`,
    );
    const dropped = { files: 2, records: 12_345, bytes: 5, until: "2026-11-28T20" };
    expect(historyText({ ...HISTORY, dropped, damagedFiles: 1 })).toContain(
      "Older ones, 12,345 records, were deleted for space. Files that cannot be read: 1.",
    );
    expect(historyText({ ...HISTORY, hours: [] })).toBe("");
  });

  it("are those of the newest attempt in which a step ended, newest first", () => {
    expect(hourChoices(HISTORY).map(({ value }) => value)).toEqual([1201, 50]);
    expect(hourChoices(HISTORY)[0]?.label).toMatch(/: steps 1,201 to 2,400$/);
    expect(hourChoices({ ...HISTORY, hours: [] })).toEqual([]);
  });

  it("open the first step of an hour", async () => {
    const page = await shown(HISTORY);
    const list = page.get("select");
    await list.setValue("50");
    expect(useSelection().selection.value.step).toBe(50);
    page.unmount();
  });

  it("are absent with a hub that has none", async () => {
    const page = await shown(null);
    expect(page.find(".stored").exists()).toBe(false);
    page.unmount();
  });
});
