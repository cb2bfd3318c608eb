import { flushPromises, mount, type VueWrapper } from "@vue/test-utils";
import { beforeEach, describe, expect, it, vi } from "vitest";
import { ApiError } from "../../../api/client";
import type { TrainingView } from "../../../api/types";
import ControlBar from "./ControlBar.vue";
import type { ControlClient } from "./useTrainingControl";
import { holderText, pauseText, stopText } from "./controlText";

const NOW_S = 1_800_000_000;
const TRAINING: TrainingView = {
  state: "running",
  attempt: 0,
  step: 12,
  totalSteps: 100,
  stepsLeft: 0,
  pausedSince: null,
  pausedSeconds: 0,
  gpus: 64,
  saves: true,
  resumeAfterSeconds: null,
  captureEvery: null,
  perturbation: null,
  perturbed: [],
  lease: null,
  orders: [],
};
const ORDER: TrainingView["orders"][number] = {
  id: "2",
  attempt: 0,
  kind: "perturb",
  steps: 0,
  every: null,
  digest: "0123456789ab",
  target: "model",
  replica: null,
  who: "ann",
  at: NOW_S,
  fromStep: null,
  refusal: null,
};
const LEASE = { who: "ann", client: "page", expiresAt: NOW_S + 25 };

function barOf(training: Partial<TrainingView>, connected = true, viewOnly?: string) {
  const client = {
    controlTraining: vi.fn(() => Promise.resolve({ key: "k", lease: LEASE })),
    orderTraining: vi.fn<ControlClient["orderTraining"]>(() => Promise.resolve({} as never)),
  };
  const bar = mount(ControlBar, {
    props: { client, training: { ...TRAINING, ...training }, serverTime: NOW_S, connected, viewOnly },
  });
  return { bar, client };
}
function button(bar: VueWrapper, name: string) {
  const [found] = bar.findAll("button").filter((one) => one.text() === name);
  if (!found) throw new Error(`no button ${name}`);
  return found;
}
/** Forms that are loaded when they are needed. */
async function loaded(): Promise<void> {
  await vi.dynamicImportSettled();
  await flushPromises();
}
const disabled = (bar: VueWrapper, name: string): boolean =>
  button(bar, name).attributes("disabled") !== undefined;

beforeEach(() => {
  HTMLDialogElement.prototype.showModal = vi.fn();
  HTMLDialogElement.prototype.close = vi.fn();
});

describe("the control bar of a training", () => {
  it("perturbs by a recipe, and undoes what is in force", async () => {
    const span = { digest: "0123456789ab", parameters: null, replica: null, firstStep: 3, lastStep: 5 };
    const { bar, client } = barOf({ perturbation: span.digest, perturbed: [span] });
    await loaded();
    const form = bar.find('form[aria-label="Perturb the training"]');
    expect(form.text()).toContain("step 3 to 5: recipe 0123456789ab");
    await form.find("textarea").setValue("[1]");
    expect(disabled(bar, "Perturb")).toBe(true);
    await form.find("textarea").setValue('{"perturbations": []}');
    await form.find('input[type="checkbox"]').setValue(true);
    await form.trigger("submit");
    await flushPromises();
    await button(bar, "Undo").trigger("click");
    await flushPromises();
    const sent = client.orderTraining.mock.calls.map(([{ kind, recipe, target }]) => [kind, recipe, target]);
    expect(sent).toEqual([
      ["perturb", { perturbations: [] }, "master"],
      ["undo", undefined, undefined],
    ]);
  });

  it("says what perturbs the training, and why the ranks refused the newest order", async () => {
    const order = { ...ORDER, refusal: "there is no layer 9; write 0 to 3" };
    const { bar } = barOf({ perturbation: "0123456789ab", orders: [order, { ...ORDER, id: "1" }] });
    expect(bar.find('[data-testid="training-perturbed"]').text()).toBe("perturbed by 0123456789ab");
    expect(bar.find('[role="alert"]').text()).toBe(
      "The order perturb was refused: there is no layer 9; write 0 to 3",
    );
    await bar.setProps({ training: { ...TRAINING, orders: [{ ...ORDER, id: "3" }, order] } });
    expect(bar.find('[role="alert"]').exists()).toBe(false);
    expect(bar.find('[data-testid="training-perturbed"]').exists()).toBe(false);
  });

  it("has no orders once the training has ended, and gives up the control", async () => {
    const { bar, client } = barOf({ state: "paused" });
    await button(bar, "Step 1").trigger("click");
    await flushPromises();
    expect(bar.text()).toContain("Release the control");
    await bar.setProps({ training: { ...TRAINING, state: "ended" } });
    expect(bar.findAll("button").map((one) => one.text())).toEqual(["", "Cancel"]);
    expect(bar.text()).toContain("Ended");
    bar.unmount();
    expect(client.controlTraining).toHaveBeenCalledTimes(1);
  });

  it("sends no order of a dialog that is open when the training ends", async () => {
    const { bar, client } = barOf({});
    await button(bar, "Stop…").trigger("click");
    await bar.setProps({ training: { ...TRAINING, state: "ended" } });
    expect(HTMLDialogElement.prototype.close).toHaveBeenCalledOnce();
    await bar.find("dialog .primary").trigger("click");
    await flushPromises();
    expect(client.controlTraining).not.toHaveBeenCalled();
  });

  it("orders captures of the next step, of every n-th step, and their end", async () => {
    const { bar, client } = barOf({ captureEvery: 20 });
    await loaded();
    expect(bar.text()).toContain("layers are captured every 20 steps");
    await button(bar, "Capture next step").trigger("click");
    await flushPromises();
    await bar.find('form[aria-label="Capture layers"]').trigger("submit");
    await flushPromises();
    await button(bar, "Captures off").trigger("click");
    await flushPromises();
    expect(client.orderTraining.mock.calls.map(([{ kind, every }]) => [kind, every])).toEqual([
      ["capture", null],
      ["capture", 50],
      ["capture", 0],
    ]);
    const others = [barOf({}).bar, barOf({ state: "stopping" }).bar] as const;
    await flushPromises();
    expect(disabled(others[0], "Captures off")).toBe(true);
    expect(disabled(others[1], "Capture next step")).toBe(true);
  });

  it("asks with the cost before it pauses many GPUs, and takes the control for the order", async () => {
    const { bar, client } = barOf({});
    await button(bar, "Pause").trigger("click");
    expect(client.orderTraining).not.toHaveBeenCalled();
    expect(bar.find("dialog").text()).toContain("64 GPUs stay allocated: 1.07 GPU-hours per minute");
    await bar.find("dialog .primary").trigger("click");
    await flushPromises();
    expect(client.controlTraining).toHaveBeenCalledWith(
      expect.objectContaining({ action: "take", force: false }),
    );
    expect(client.orderTraining).toHaveBeenCalledWith({
      lease: "k",
      kind: "pause",
      steps: null,
      every: null,
      id: null,
    });
    expect(bar.text()).toContain("Release the control");
  });

  it("steps and resumes only in a pause, and pauses few GPUs at once", async () => {
    const { bar, client } = barOf({ gpus: 0 });
    expect(["Resume", "Step 1", "Step"].map((name) => disabled(bar, name))).toEqual([true, true, true]);
    await button(bar, "Pause").trigger("click");
    await flushPromises();
    expect(client.orderTraining).toHaveBeenCalledOnce();
    await bar.setProps({ training: { ...TRAINING, state: "paused" } });
    expect(["Pause", "Resume", "Step 1"].map((name) => disabled(bar, name))).toEqual([true, false, false]);
    await bar.find("input").setValue("7");
    await bar.find("form").trigger("submit");
    await flushPromises();
    expect(client.orderTraining).toHaveBeenLastCalledWith(
      expect.objectContaining({ kind: "step", steps: 7, every: null }),
    );
    bar.vm.toggle();
    await flushPromises();
    expect(client.orderTraining).toHaveBeenLastCalledWith(expect.objectContaining({ kind: "resume" }));
  });

  it("shows who has the control, and keys do nothing without it", async () => {
    const { bar, client } = barOf({ lease: LEASE, state: "paused" });
    expect(bar.text()).toContain("controlled by ann, page (25 s)");
    expect(["Pause", "Resume", "Stop…"].map((name) => disabled(bar, name))).toEqual([true, true, true]);
    bar.vm.stepOnce();
    expect(client.controlTraining).not.toHaveBeenCalled();
    await button(bar, "Take over…").trigger("click");
    await bar.find("dialog .primary").trigger("click");
    await flushPromises();
    expect(client.controlTraining).toHaveBeenCalledWith(expect.objectContaining({ force: true }));
  });

  it("is of no use to a viewer, and says why", async () => {
    const training = {
      state: "paused",
      lease: LEASE,
      captureEvery: 20,
      perturbation: "0123456789ab",
    } as const;
    const { bar, client } = barOf(training, true, "Needs the controller role");
    await loaded();
    const buttons = bar.findAll(".bar button, details button").filter((one) => one.text() !== "");
    expect(buttons.length).toBeGreaterThan(8);
    expect(buttons.filter((one) => one.attributes("disabled") === undefined)).toEqual([]);
    expect(disabled(bar, "Take over…")).toBe(true);
    await bar.find("form").trigger("submit");
    bar.vm.stepOnce();
    bar.vm.toggle();
    await flushPromises();
    expect(client.controlTraining).not.toHaveBeenCalled();
    expect(bar.text()).toContain("Needs the controller role");
    await bar.setProps({ training: { ...TRAINING, state: "ended" } });
    expect(bar.text()).not.toContain("controller role");
  });

  it("shows a refusal, forgets a lease that was lost, and waits without a connection", async () => {
    const { bar, client } = barOf({ gpus: 0 });
    client.orderTraining.mockRejectedValueOnce(
      new ApiError(409, "bob has taken the control", "Look on.", { code: "lease-lost" }),
    );
    await button(bar, "Pause").trigger("click");
    await flushPromises();
    expect(bar.find("[role=alert]").text()).toBe("bob has taken the control. Look on.");
    expect(bar.text()).not.toContain("Release the control");
    await bar.setProps({ connected: false });
    expect(disabled(bar, "Pause")).toBe(true);
    expect(bar.text()).toContain("this state may be old");
    expect(disabled(barOf({ saves: false }).bar, "Stop…")).toBe(true);
  });

  it("puts lengths and cost into words", () => {
    const pausedSince = new Date((NOW_S - 720) * 1000).toISOString();
    expect(pauseText({ ...TRAINING, pausedSince }, NOW_S)).toBe(
      "for 12 min 0 s: 64 GPUs idle, 12.8 GPU-hours",
    );
    expect(pauseText(TRAINING, NOW_S)).toBeNull();
    expect(stopText(TRAINING)).toContain("a checkpoint is written");
    expect(stopText({ ...TRAINING, step: 0, state: "paused" })).toContain("no checkpoint is written");
    expect(holderText({ ...TRAINING, lease: LEASE }, NOW_S + 30, false)).toBe(
      "no client controls this training",
    );
  });
});
