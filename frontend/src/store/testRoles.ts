/** Forward and backward ranks for tests. */
import type { ForwardBackward, ForwardBackwardView } from "../api/types";

export const PUBLISHED: ForwardBackward = {
  fromStep: 5,
  ship: "selective",
  chosen: true,
  merged: false,
  backwardPerForward: 2,
  shipBytes: 3 << 20,
  forwardSeconds: 0.01,
  backwardSeconds: 0.02,
  shipSeconds: 0.001,
  modes: [
    { ship: "saved", shipBytes: 5 << 20, stepSeconds: 0.3 },
    { ship: "selective", shipBytes: 3 << 20, stepSeconds: 0.25 },
    { ship: "full", shipBytes: 1 << 20, stepSeconds: null },
  ],
  advisedBackwardPerForward: 3,
  advice: "Forward ranks are idle half of the time; write fbd.backwardPerForward: 3.",
};

export function rolesOf(more: Partial<ForwardBackwardView> = {}): ForwardBackwardView {
  return {
    attempt: 0,
    state: PUBLISHED,
    roles: [
      {
        role: "forward",
        ranks: [2],
        busy: 0.5,
        passSeconds: 0.01,
        waitSeconds: 0.004,
        rankBusy: [0.5],
        rankPassSeconds: [0.01],
        rankWaitSeconds: [0.004],
      },
      {
        role: "backward",
        ranks: [0, 1],
        busy: 0.8,
        passSeconds: 0.02,
        waitSeconds: 0.002,
        rankBusy: [0.75, 0.85],
        rankPassSeconds: [0.02, 0.02],
        rankWaitSeconds: [0.001, 0.003],
      },
    ],
    roleSteps: 2,
    steps: [4, 5],
    seconds: [0.3, 0.26],
    forwardBusy: [0.45, 0.5],
    backwardBusy: [0.7, 0.8],
    forwardSeconds: [0.01, 0.01],
    backwardSeconds: [0.02, 0.02],
    shipmentWaitSeconds: [0.002, 0.002],
    creditWaitSeconds: [0.004, null],
    transfers: [
      {
        source: 2,
        destination: 0,
        path: "shared-memory",
        transfers: 16,
        bytes: 32_768,
        copySeconds: 16e-5,
        bytesPerSecond: 204_800_000,
      },
    ],
    ...more,
  };
}
