// Fails where what a page loads passes its budget (gzip): it must open fast over a tunnel.
import { readdirSync, readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const FIRST_KIB = { js: 66, css: 12 };
/**
 * All screens that are loaded when they are opened, scripts and styles together. The timeline was moved here from the
 * first load, whose budget is lower by as much, and windows of steps too large to load whole came in addition.
 */
const LAZY_KIB = 150;
const dist = new URL("../dist/", import.meta.url);
const html = readFileSync(new URL("index.html", dist), "utf8");
const sizeOf = (name) => gzipSync(readFileSync(new URL(`assets/${name}`, dist))).length / 1024;

let failed = false;
function judge(label, kib, budget) {
  failed ||= kib > budget;
  console.log(`${label}: ${kib.toFixed(1)} KiB gzip of ${budget}`);
}
const files = readdirSync(new URL("assets/", dist));
const sum = (names) => names.reduce((total, name) => total + sizeOf(name), 0);
for (const [suffix, budget] of Object.entries(FIRST_KIB)) {
  judge(
    `first load, ${suffix}`,
    sum(files.filter((name) => name.endsWith(`.${suffix}`) && html.includes(name))),
    budget,
  );
}
judge(
  "loaded later",
  sum(files.filter((name) => /\.(js|css)$/.test(name) && !html.includes(name))),
  LAZY_KIB,
);
if (failed) {
  console.error("A budget is passed; see the constants in scripts/size.js.");
  process.exit(1);
}
