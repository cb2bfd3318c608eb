import vue from "@vitejs/plugin-vue";
import { defineConfig } from "vitest/config";

const hub = process.env.VITE_HUB ?? "http://127.0.0.1:8080";

export default defineConfig({
  base: "./",
  plugins: [vue()],
  server: { proxy: { "/api": { target: hub, ws: true } } },
  build: { target: "es2022", assetsInlineLimit: 0, reportCompressedSize: false },
  test: { environment: "happy-dom", include: ["src/**/*.test.ts"], restoreMocks: true },
});
