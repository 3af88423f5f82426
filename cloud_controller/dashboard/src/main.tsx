import { render } from "preact";
import { App } from "./app";
import { applyTheme } from "./parts/theme";
import "./styles.css";

applyTheme();
const place = document.getElementById("app");
if (place !== null) render(<App />, place);
