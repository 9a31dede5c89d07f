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
// What Django's forms leave without a name: the tooltips of two lists, and the second field of a date with a time.
function nameFields() {
  for (const tooltip of document.querySelectorAll(".help-tooltip[aria-label]")) tooltip.setAttribute("role", "img");
  for (const field of document.querySelectorAll(".vDateField, .vTimeField")) {
    if (field.labels.length) continue;
    const row = field.closest(".field-line")?.querySelector("label")?.textContent.trim() ?? field.name;
    field.setAttribute("aria-label", `${row}, ${field.matches(".vDateField") ? "date" : "time"}`);
  }
}
// Places that a screen reader jumps to, which Unfold leaves without a role, or gives one name.
function nameRegions() {
  document.getElementById("main")?.setAttribute("role", "main");
  document.querySelectorAll(".simplebar-content-wrapper").forEach((region, number) => {
    region.setAttribute("aria-label", region.closest("#nav-sidebar") ? "Lists of the admin" : `Rows, table ${number}`);
  });
  for (const head of document.querySelectorAll("#main th")) {
    if (head.textContent.trim() || head.children.length) continue;
    head.append(Object.assign(document.createElement("span"), { className: "sr-only", textContent: "Actions" }));
  }
}
// Unfold looks once, when a page opens, whether the system is dark.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  document.documentElement.classList.toggle("dark", event.matches);
});
// after Django's own handlers of the same event, which make the tooltips
window.addEventListener("load", () => setTimeout(() => (nameFields(), nameRegions())));
