// <ratchet-thumbs token="..." endpoint="https://ratchet.example">: one answer's thumbs, stars, reasons and correction.
// docs/feedback-anywhere.md lists the attributes, events, slots, parts and custom properties.

const HOME = new URL(import.meta.url).origin;
const TEXTS = {
  group: "Rate this answer",
  up: "Good answer",
  down: "Bad answer",
  stars: "Stars",
  star: "{n} of 5 stars",
  reasons: "What was wrong?",
  correction: "What should it have said?",
  send: "Send",
  sending: "Sending…",
  thanks: "Thank you",
  failed: "Not sent. Please try again.",
  gone: "This answer cannot be rated.",
};
const THUMB =
  "M7 10.5v10H3.5v-10zM9 20.5h8.3a2 2 0 0 0 2-1.6l1.2-6.2a2 2 0 0 0-2-2.4h-4.6l.8-4.6a2 2 0 0 0-3.7-1.3L9 10.5z";
const TRIES = 5;

const STYLE = new CSSStyleSheet();
STYLE.replaceSync(`
:host {
  --_good: var(--ratchet-thumbs-good, #1b7a43); --_bad: var(--ratchet-thumbs-bad, #b8352b);
  --_star: var(--ratchet-thumbs-star, #b06d00); --_ink: var(--ratchet-thumbs-color, currentcolor);
  --_line: var(--ratchet-thumbs-line, color-mix(in srgb, currentcolor 55%, transparent));
  --_radius: var(--ratchet-thumbs-radius, 8px); --_on: var(--ratchet-thumbs-pressed, #fff);
  display: inline-block; font: var(--ratchet-thumbs-font, inherit); color: var(--_ink); max-width: 100%;
}
:host([hidden]), [hidden] { display: none; }
.row { display: flex; flex-wrap: wrap; align-items: center; gap: var(--ratchet-thumbs-gap, .4rem); }
button, textarea { font: inherit; color: inherit; background: transparent; border: 1px solid var(--_line); border-radius: var(--_radius); }
button { min-width: 2.5rem; min-height: 2.5rem; padding: .2rem .6rem; cursor: pointer; display: inline-flex; align-items: center; justify-content: center; }
button:hover { border-color: currentcolor; }
:focus-visible { outline: 3px solid currentcolor; outline-offset: 2px; }
.up[aria-pressed=true] { background: var(--_good); border-color: var(--_good); color: var(--_on); }
.down[aria-pressed=true] { background: var(--_bad); border-color: var(--_bad); color: var(--_on); }
.star { border: 0; min-width: 1.9rem; padding: 0; font-size: 1.35em; line-height: 1; }
.star[aria-pressed=true] { color: var(--_star); }
svg { width: 1.3em; height: 1.3em; fill: none; stroke: currentcolor; stroke-width: 1.8; stroke-linejoin: round; }
.down svg { transform: rotate(180deg); }
form { display: grid; gap: .6rem; margin-top: .6rem; max-width: 28rem; }
fieldset { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
legend { padding: 0; margin-bottom: .2rem; }
label { display: inline-flex; align-items: center; gap: .4rem; min-height: 2rem; }
.words { display: grid; gap: .2rem; }
textarea { padding: .4rem .5rem; resize: vertical; width: 100%; box-sizing: border-box; }
form button { justify-self: start; }
`);

function make(tag, attributes = {}, children = [], space = "http://www.w3.org/1999/xhtml") {
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function icon() {
  const space = "http://www.w3.org/2000/svg";
  return make("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, [make("path", { d: THUMB }, [], space)], space);
}

class RatchetThumbs extends HTMLElement {
  static observedAttributes = ["token", "decision", "key", "stars", "reasons", "correction"];
  #said = {};
  #sent = Promise.resolve();
  #turn = 0;
  #status;
  #details;

  connectedCallback() {
    if (!this.shadowRoot) this.attachShadow({ mode: "open" }).adoptedStyleSheets = [STYLE];
    this.#render();
  }

  attributeChangedCallback() {
    if (this.shadowRoot) this.#render();
  }

  #text(name) {
    return this.getAttribute(`text-${name}`) ?? TEXTS[name];
  }

  #button(kind, label, rating, content) {
    const attributes = { type: "button", class: kind, part: `button ${kind}`, title: label };
    const button = make("button", { ...attributes, "aria-label": label, "aria-pressed": "false" }, [content]);
    button.onclick = () => this.#rate(rating);
    return button;
  }

  #render() {
    this.#said = {};
    this.#turn += 1;
    this.#status = make("span", { role: "status", part: "status" });
    const thumb = (kind) =>
      this.#button(kind, this.#text(kind), { thumb: kind }, make("slot", { name: kind }, [icon()]));
    const row = make("div", { class: "row" }, [thumb("up"), thumb("down")]);
    if (this.hasAttribute("stars")) row.append(this.#stars());
    row.append(this.#status);
    this.#details = this.#form();
    const group = { role: "group", "aria-label": this.#text("group") };
    this.shadowRoot.replaceChildren(make("div", group, [row, this.#details]));
  }

  #stars() {
    const label = (n) => this.#text("star").replace("{n}", n);
    const stars = [1, 2, 3, 4, 5].map((n) => this.#button("star", label(n), { stars: n }, "☆"));
    return make("span", { role: "group", "aria-label": this.#text("stars"), part: "stars" }, stars);
  }

  #form() {
    const reasons = (this.getAttribute("reasons") ?? "").split(",").map((one) => one.trim()).filter(Boolean);
    const form = make("form", { hidden: "", part: "details" });
    if (reasons.length) {
      const box = (value) => make("input", { type: "checkbox", name: "reason", value });
      const boxes = reasons.map((value) => make("label", {}, [box(value), value]));
      form.append(make("fieldset", {}, [make("legend", {}, [this.#text("reasons")]), ...boxes]));
    }
    if (this.hasAttribute("correction")) {
      const words = make("textarea", { name: "correction", rows: 3 });
      form.append(make("label", { class: "words" }, [this.#text("correction"), words]));
    }
    form.append(make("button", { part: "button send" }, [this.#text("send")]));
    form.onsubmit = async (event) => {
      event.preventDefault();
      const sent = new FormData(form);
      const tags = sent.getAll("reason");
      const correction = (sent.get("correction") ?? "").trim() || null;
      if (await this.#rate({ tags: tags.length ? tags : null, correction })) form.hidden = true;
    };
    return form;
  }

  #show() {
    for (const button of this.shadowRoot.querySelectorAll("[aria-pressed]")) {
      const isStar = button.className === "star";
      const stars = [...button.parentNode.children].indexOf(button) < this.#said.stars;
      const pressed = isStar ? stars : button.className === this.#said.thumb;
      button.setAttribute("aria-pressed", pressed);
      if (isStar) button.textContent = pressed ? "★" : "☆";
    }
    const asks = this.hasAttribute("reasons") || this.hasAttribute("correction");
    this.#details.hidden = !(asks && this.#said.thumb === "down");
  }

  // Shows the rating at once, sends it after earlier ones, and takes it back if it cannot be stored.
  #rate(more) {
    const before = this.#said;
    const turn = ++this.#turn;
    this.#said = { ...before, ...more };
    this.#show();
    this.#status.textContent = this.#text("sending");
    const rating = this.#said;
    const sent = this.#sent.then(async () => {
      const status = turn === this.#turn ? await this.#post(rating) : 0;
      if (turn !== this.#turn) return false;
      const stored = status === 200 || status === 201;
      if (!stored) {
        this.#said = before;
        this.#show();
      }
      const gone = status === 403 || status === 404 || status === 410;
      this.#status.textContent = this.#text(stored ? "thanks" : gone ? "gone" : "failed");
      const detail = { rating, status };
      this.dispatchEvent(new CustomEvent(stored ? "ratchet-rated" : "ratchet-failed", { detail, bubbles: true, composed: true }));
      return stored;
    });
    this.#sent = sent.catch(() => false);
    return this.#sent;
  }

  async #post(rating) {
    const key = this.getAttribute("key");
    const place = this.getAttribute("token") || this.getAttribute("decision");
    const url = `${this.getAttribute("endpoint") ?? HOME}/api/feedback/${encodeURIComponent(place)}`;
    const body = JSON.stringify({ ...rating, id: crypto.randomUUID?.() });
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    for (let tries = 1; ; tries += 1) {
      try {
        const keepalive = body.length < 60_000;
        const answer = await fetch(url, { method: "POST", headers, body, credentials: "omit", keepalive });
        if ((answer.status !== 503 && answer.status !== 429) || tries === TRIES) return answer.status;
        const wait = Math.min(Number(answer.headers.get("Retry-After")) || 1, 10);
        await new Promise((done) => setTimeout(done, 1000 * wait));
      } catch {
        return 0;
      }
    }
  }
}

customElements.get("ratchet-thumbs") ?? customElements.define("ratchet-thumbs", RatchetThumbs);
