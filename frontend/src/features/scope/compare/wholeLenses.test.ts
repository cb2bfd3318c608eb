import { expect, it } from "vitest";
import { RecordedClient } from "../../../scope/session/recordedClient";
import type { RecordedSession } from "../../../scope/session/recordedSession";
import { ScopeFrame } from "../../../scope/protocol";
import { scopeFrame } from "../../../scope/testFrames";
import { decodeFrame } from "../../../wire/frames";
import { withWholeLenses } from "./wholeLenses";

const lens = (...layers: number[]) =>
  decodeFrame(scopeFrame(ScopeFrame.ANALYSIS, { kind: "lens", sample: 0, rows: [0, 2], layers }));
const other = decodeFrame(scopeFrame(ScopeFrame.ANALYSIS, { kind: "attribution", sample: 0 }));
const opened = (...analyses: RecordedSession["analyses"]) =>
  withWholeLenses({ hello: { model: { layers: 2 } }, analyses } as unknown as RecordedSession);

it("a lens of some layers of a file is not shown as one of the first layers", async () => {
  const query = { sample: 0, positions: "0-1", token: null };
  const part = opened(lens(1), other);
  expect(part.analyses).toEqual([other]);
  await expect(new RecordedClient(part).analysis("lens", "r", query)).rejects.toThrow("not recorded");
  const whole = await new RecordedClient(opened(lens(1), lens(0, 1))).analysis("lens", "r", query);
  expect(whole.layers).toEqual([0, 1]);
});
