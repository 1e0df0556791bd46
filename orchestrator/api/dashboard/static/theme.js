// Sets the theme before the page is drawn, so that nothing flashes: the chosen theme, or else the system's.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("orchestrator-theme"); } catch (error) { /* no storage */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  document.documentElement.dataset.scripted = ""; // CSS hides elements that a script shows later
})();
