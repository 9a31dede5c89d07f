// The arrow keys leaf: each presses the link that carries it. Without scripts the links do.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target instanceof Element && event.target.matches("input, textarea, select, [tabindex='0'] *, [tabindex='0']")) return;
  const link = document.querySelector(`[data-leaf="${CSS.escape(event.key)}"]`);
  if (!link) return;
  event.preventDefault();
  link.click();
});
