import { createApp } from "vue";
import App from "./app/App.vue";
import { useCode, watchCode } from "./app/login";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/panels.css";

watchCode(window);
await useCode({
  location,
  history,
  document,
  fetch: (input, init) => window.fetch(input, init),
});
createApp(App).mount("#app");
