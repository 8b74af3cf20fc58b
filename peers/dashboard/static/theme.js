// Light or dark: as the system has it, or as the switch says, which the browser remembers. Runs before the page is
// drawn, so that it does not flash.
"use strict";

(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("theme");
  } catch {
    // The browser keeps nothing for this page.
  }

  function apply() {
    root.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    if (button) button.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
    dispatchEvent(new Event("themechange"));
  }

  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("theme", chosen);
      } catch {
        // It holds until the page is closed.
      }
      apply();
    });
  });
})();
