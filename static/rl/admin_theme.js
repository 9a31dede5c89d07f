// The admin follows the system's light or dark, as the pages do; a choice of its own, kept in the browser, would leave
// the bar on top in the other colours.
"use strict";
localStorage.setItem("adminTheme", JSON.stringify("auto"));
window.addEventListener(
  "keydown",
  (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "e") event.stopImmediatePropagation();
  },
  true,
);
