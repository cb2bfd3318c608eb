import { createApp } from "vue";
import App from "./app/App.vue";
import "./styles/tokens.css";
import "./styles/base.css";

createApp(App).mount("#app");
