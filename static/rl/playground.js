// Answers in free text are streamed side by side; everything else is an ordinary form. The page that is shown in the
// end is the server's own, asked for by the ids of the recorded answers.
"use strict";
(() => {
  const form = document.getElementById("playground");
  if (!form) return;
  document.documentElement.classList.add("scripted");
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  // what the server reads as a state or as listed candidates is chosen, not written word by word
  const plain = () => form.dataset.streams === "on" && !/^\s*[[{]/.test(form.elements.question.value)
    && !form.elements.candidates.value.trim();

  const column = (policy) => {
    const article = document.createElement("article");
    article.className = "card answer-card";
    const header = document.createElement("header");
    const title = document.createElement("h2");
    title.textContent = policy;
    header.append(title);
    const text = document.createElement("div");
    text.className = "side-text";
    const words = document.createElement("div");
    words.className = "words waits";
    text.append(words);
    article.append(header, text);
    return { article, words };
  };

  const fail = (place, reason) => {
    place.words.classList.remove("waits");
    const fault = document.createElement("p");
    fault.className = "fault";
    fault.textContent = reason;
    place.article.append(fault);
    return "";
  };

  const stream = async (policy, place) => {
    const answer = await fetch(form.dataset.chat, {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
      body: JSON.stringify({
        model: `${form.dataset.agent}:${policy}`,
        messages: [
          ...(form.dataset.system ? [{ role: "system", content: form.dataset.system }] : []),
          { role: "user", content: form.elements.question.value },
        ],
        metadata: { playground: "page" },
        stream: true,
      }),
    });
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      return fail(place, said.error?.message || `the server answered ${answer.status}`);
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let id = "", rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) return fail(place, event.error.message);
        id = event.id || id;
        place.words.textContent += event.choices?.[0]?.delta?.content || "";
      }
    }
    place.words.classList.remove("waits");
    return id;
  };

  // an answer is stored in groups, a moment after it was given
  const settle = async (ids, failed) => {
    const address = `${form.dataset.page}?answers=${ids.join(",")}`;
    for (let attempt = 0; attempt < 20; attempt += 1) {
      const page = await fetch(address, { credentials: "same-origin" });
      const fresh = new DOMParser().parseFromString(await page.text(), "text/html").getElementById("answers");
      if (page.ok && fresh && fresh.dataset.stored.split(",").length === ids.length) {
        fresh.append(...failed);
        document.getElementById("answers").replaceWith(document.adoptNode(fresh));
        history.replaceState(null, "", address);
        return;
      }
      await pause(250);
    }
  };

  form.addEventListener("submit", async (event) => {
    const policies = [...form.querySelectorAll("input[name=policy]:checked")].map((box) => box.value);
    if (!plain() || !policies.length) return;
    event.preventDefault();
    const button = form.querySelector("button[type=submit]");
    button.disabled = true;
    const places = policies.map(column);
    document.getElementById("answers").replaceChildren(...places.map((place) => place.article));
    const ids = await Promise.all(policies.map((policy, n) =>
      stream(policy, places[n]).catch(() => fail(places[n], "the server cannot be reached"))));
    button.disabled = false;
    const failed = places.filter((_, n) => !ids[n]).map((place) => place.article);
    if (failed.length < places.length) await settle(ids.filter(Boolean), failed);
  });

  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
})();
