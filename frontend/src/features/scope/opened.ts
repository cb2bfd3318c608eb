/** Parts of the screen that are loaded when they are opened; one file, since they share most of their panels. */
export { default as CompareArea } from "./compare/CompareArea.vue";
export { default as LabView } from "./lab/LabView.vue";
