// A region marked data-live is asked for again while something moves in it; without scripts the page reloads itself.
// It is asked for at its data-live-from, else at the page's own address.
// A part elsewhere on the page, with an id and marked data-live-also, is replaced with it once its words change.
// What somebody opened or shut (details with an id) stays so. Charts hear of it by the events live:leaving and live:updated.
"use strict";
(() => {
  const every = 2000;
  const busy = (region) => {
    const active = document.activeElement;
    return region.contains(active) && !active.closest("[data-chart]");
  };
  const look = async () => {
    const region = document.querySelector("[data-live]");
    if (!region || region.dataset.live !== "on") return;
    if (!document.hidden && !busy(region)) {
      try {
        const answer = await fetch(region.dataset.liveFrom || location.href, { headers: { "X-Live": "1" }, credentials: "same-origin" });
        if (answer.ok) {
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          const fresh = page.querySelector("[data-live]");
          if (page.querySelector(".masthead")) document.querySelector(".at-work-strip")?.replaceWith(page.querySelector(".at-work-strip") || "");
          for (const part of document.querySelectorAll("[data-live-also]")) {
            const now = page.getElementById(part.id);
            if (now && !busy(part) && now.textContent !== part.textContent) part.replaceWith(document.adoptNode(now));
          }
          if (fresh && !busy(region)) {
            document.dispatchEvent(new Event("live:leaving"));
            for (const details of fresh.querySelectorAll("details[id]")) {
              const before = document.getElementById(details.id);
              if (before) details.open = before.open;
            }
            region.replaceWith(document.adoptNode(fresh));
            document.dispatchEvent(new Event("live:updated"));
          }
        }
      } catch (error) {
        // the server is away for a moment; the next look may find it
      }
    }
    setTimeout(look, every);
  };
  setTimeout(look, every);
})();
