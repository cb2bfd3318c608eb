import vue from "@vitejs/plugin-vue";
import { defineConfig } from "vitest/config";

const hub = process.env.VITE_HUB ?? "http://127.0.0.1:8080";

/** Tests of folders below src; what knows no Vue runs without a document, which each file would wait for. */
const tests = (folders: string): string[] => [`src/{${folders}}/**/*.test.ts`];

export default defineConfig({
  base: "./",
  plugins: [vue()],
  server: { proxy: { "/api": { target: hub, ws: true } } },
  build: {
    target: "es2022",
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    // One file for the first load: cut where screens share code, it is many small requests that compress worse.
    rolldownOptions: { output: { codeSplitting: { groups: [{ name: "first", tags: ["$initial"] }] } } },
  },
  test: {
    restoreMocks: true,
    unstubGlobals: true,
    // A busy machine is no failure: modules may take long to be compiled and loaded.
    testTimeout: 120_000,
    hookTimeout: 120_000,
    teardownTimeout: 120_000,
    // A document and the modules for each file took four fifths of the processor time; a file leaves nothing behind.
    isolate: false,
    projects: [
      {
        extends: true,
        test: { name: "logic", environment: "node", include: tests("api,wire,store,render,trace,scope") },
      },
      {
        extends: true,
        test: {
          name: "page",
          environment: "happy-dom",
          include: tests("app,composables,features,ui"),
          setupFiles: ["./vitest.setup.ts"],
        },
      },
    ],
  },
});
