// Fails where the first load passes its budget (gzip): the page must open fast over a tunnel.
import { readdirSync, readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const BUDGET_KIB = { js: 70, css: 12 };
const folder = new URL("../dist/assets/", import.meta.url);

let failed = false;
for (const [suffix, budget] of Object.entries(BUDGET_KIB)) {
  const files = readdirSync(folder).filter((name) => name.endsWith(`.${suffix}`));
  const bytes = files.reduce((sum, name) => sum + gzipSync(readFileSync(new URL(name, folder))).length, 0);
  const kib = bytes / 1024;
  failed ||= kib > budget;
  console.log(`${suffix}: ${kib.toFixed(1)} KiB gzip of ${budget}`);
}
if (failed) {
  console.error("The first load passes its budget; see BUDGET_KIB in scripts/size.js.");
  process.exit(1);
}
