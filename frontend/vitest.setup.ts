/** Lets the components that a test has begun to load arrive before its environment ends, which would fail the run. */
import { afterAll, vi } from "vitest";

afterAll(() => vi.dynamicImportSettled());
