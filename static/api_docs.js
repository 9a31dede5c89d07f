// Swagger UI in our frame: light or dark as the system is, and a signed-in person's calls carry Django's CSRF token.
"use strict";
(() => {
  const place = document.getElementById("swagger-ui");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
  follow();
  dark.addEventListener("change", follow);
  SwaggerUIBundle({
    url: place.dataset.schema,
    domNode: place,
    presets: [SwaggerUIBundle.presets.apis],
    layout: "BaseLayout",
    // its links would stand within buttons
    deepLinking: false,
    // on a phone the calls of a kind are folded
    docExpansion: window.matchMedia("(max-width: 640px)").matches ? "none" : "list",
    defaultModelsExpandDepth: 0,
    requestInterceptor: (request) => {
      if (request.method && request.method !== "GET") request.headers["X-CSRFToken"] = place.dataset.csrf;
      return request;
    },
  });
})();
