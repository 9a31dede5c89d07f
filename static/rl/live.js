// A region marked data-live is asked for again while something moves in it; without scripts the page reloads itself.
"use strict";
(() => {
  const every = 2000;
  const look = async () => {
    const region = document.querySelector("[data-live]");
    if (!region || region.dataset.live !== "on") return;
    if (!document.hidden && !region.contains(document.activeElement)) {
      try {
        const answer = await fetch(location.href, { headers: { "X-Live": "1" }, credentials: "same-origin" });
        if (answer.ok) {
          const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-live]");
          if (fresh) region.replaceWith(document.adoptNode(fresh));
        }
      } catch (error) {
        // the server is away for a moment; the next look may find it
      }
    }
    setTimeout(look, every);
  };
  setTimeout(look, every);
})();
