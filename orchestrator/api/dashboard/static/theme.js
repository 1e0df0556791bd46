// Runs before the page is drawn, so that nothing flashes: the theme that was chosen, else that of the system.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("orchestrator-theme"); } catch (error) { /* a browser may keep nothing */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  document.documentElement.dataset.scripted = ""; // what only a script shows is hidden from the start
})();
