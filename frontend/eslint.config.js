import accessibility from "eslint-plugin-vuejs-accessibility";
import vue from "eslint-plugin-vue";
import globals from "globals";
import { config, configs, parser } from "typescript-eslint";

const relativeApi = "the page reaches the hub through api/client.ts and wire/live.ts only";

export default config(
  { ignores: ["dist/", "src/api/hub.d.ts", "src/api/gateway.d.ts"] },
  configs.strict,
  vue.configs["flat/recommended"],
  accessibility.configs["flat/recommended"],
  {
    languageOptions: {
      globals: { ...globals.browser, ...globals.node },
      parserOptions: { parser, extraFileExtensions: [".vue"] },
    },
    rules: {
      eqeqeq: "error",
      "no-console": "error",
      "max-lines": ["error", { max: 250 }],
      "max-lines-per-function": ["error", { max: 60, skipComments: true, skipBlankLines: true }],
      complexity: ["error", 12],
      "@typescript-eslint/consistent-type-imports": "error",
      "no-restricted-exports": ["error", { restrictDefaultExports: { direct: true } }],
      "no-restricted-globals": [
        "error",
        { name: "fetch", message: relativeApi },
        { name: "WebSocket", message: relativeApi },
      ],
      "vue/block-order": ["error", { order: ["script", "template", "style"] }],
      "vue/component-api-style": ["error", ["script-setup"]],
      "vue/define-macros-order": "error",
      "vue/html-self-closing": ["error", { html: { void: "always", normal: "never", component: "always" } }],
      "vue/html-indent": "off",
      "vue/max-attributes-per-line": "off",
      "vue/singleline-html-element-content-newline": "off",
      "vue/html-closing-bracket-newline": "off",
      "vue/require-default-prop": "off",
      "vuejs-accessibility/label-has-for": ["error", { required: { some: ["nesting", "id"] } }],
    },
  },
  { files: ["src/api/client.ts", "src/wire/live.ts"], rules: { "no-restricted-globals": "off" } },
  {
    files: ["src/wire/**", "src/store/**", "src/render/**", "src/trace/**", "src/scope/**"],
    rules: {
      "no-restricted-imports": [
        "error",
        { paths: [{ name: "vue", message: "wire, store, render, trace and scope know nothing of Vue" }] },
      ],
    },
  },
  {
    files: ["**/*.test.ts", "*.config.*", "scripts/**"],
    rules: { "max-lines-per-function": "off", "no-restricted-exports": "off", "no-console": "off" },
  },
);
