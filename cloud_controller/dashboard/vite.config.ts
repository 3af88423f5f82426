import { defineConfig } from "vite";

// Built into the Python package, which serves it. No script or style is written into the page itself: the controller's
// content security policy allows none.
export default defineConfig({
  build: {
    outDir: "../edgesplit_controller/dashboard_assets",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 200,
  },
  server: { proxy: { "/v1": { target: "https://localhost:8443", secure: false } } },
});
