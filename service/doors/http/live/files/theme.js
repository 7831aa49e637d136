// The theme of a page: auto, light or dark. The choice is kept in the tab.

import { themeChanged } from "./canvas.js";

const KEY = "attnd-theme";
const ORDER = ["auto", "light", "dark"];

/** Lets a button change the theme, for the page and its drawings. */
export function useTheme(button, drawings) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => sessionStorage.getItem(KEY) ?? "auto";
  const apply = () => {
    const found = chosen() === "auto" ? (dark.matches ? "dark" : "light") : chosen();
    document.documentElement.dataset.theme = found;
    button.textContent = `Theme: ${chosen()}`;
    themeChanged();
    for (const one of drawings) one.themeChanged();
  };
  button.addEventListener("click", () => {
    sessionStorage.setItem(KEY, ORDER[(ORDER.indexOf(chosen()) + 1) % ORDER.length]);
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}
