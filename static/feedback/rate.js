// The rating pages: keys, and the next card, fetched while this one is read, shown the moment this one is rated.
// Everything here is also a plain form: with scripts blocked the pages work, one load per rating.
"use strict";

document.documentElement.classList.add("scripted");

const stage = document.getElementById("stage");
const keys = document.getElementById("keys");
const narrow = window.matchMedia("(max-width: 640px)");
const CARD = { "X-Ratchet-Card": "1" };
let busy = false;
let ahead = null; // { after, card }: the card that follows the one in front, waiting to be shown
let fetching = Promise.resolve(); // until that card is there
const PATIENCE_MS = 1000; // how long a rating waits for it
const READ_MS = 250; // a key sooner than this after a new card was meant for the one before: a double press
let shownAt = 0;
let waiting = ""; // a key pressed on the card in front while the one before is still being saved

const shownId = (place = stage) => place.querySelector("[data-shown]")?.dataset.shown;

function announce(text) {
  const said = stage.querySelector(".said");
  if (said) said.textContent = text;
}

function fragment(html) {
  const place = document.createElement("div");
  place.innerHTML = html;
  return place;
}

function show(place) {
  stage.replaceChildren(...place.childNodes);
  shownAt = performance.now();
  // on a phone the card comes to the top, in place of the bars above it
  if (narrow.matches) stage.querySelector(".decision")?.scrollIntoView();
  else if (stage.hasAttribute("data-in-place")) stage.scrollIntoView({ block: "nearest" });
  else window.scrollTo(0, 0);
  const title = document.getElementById("asked");
  if (title) title.focus({ preventScroll: true });
}

async function fetchAhead() {
  ahead = null;
  delete stage.dataset.ahead;
  const form = stage.querySelector("[data-next]");
  if (!form) return;
  const after = shownId();
  try {
    const answer = await fetch(form.dataset.next, { headers: CARD, credentials: "same-origin" });
    if (answer.status === 200 && answer.headers.get("X-Ratchet-Card") === "1" && shownId() === after) {
      const card = fragment(await answer.text());
      if (shownId() === after) ahead = { after, card };
      stage.toggleAttribute("data-ahead", ahead !== null);
    }
  } catch {
    // no connection: sending will say so; without a card ahead the answer brings the next one
  }
}

// The form in front stays as it is, aside, until the server has it: what was typed is not lost with a connection.
function goAhead() {
  const aside = document.createDocumentFragment();
  aside.append(...stage.childNodes);
  show(ahead.card);
  ahead = null;
  delete stage.dataset.ahead;
  return aside;
}

function goBack(aside) {
  waiting = "";
  if (aside) stage.replaceChildren(aside);
}

async function send(sent, submitter) {
  const body = new FormData(sent, submitter);
  const target = submitter.getAttribute("formaction") || sent.getAttribute("action");
  const headers = { ...CARD };
  let aside = null;
  busy = true;
  await Promise.race([fetching, new Promise((resolve) => setTimeout(resolve, PATIENCE_MS))]);
  if (submitter.hasAttribute("data-leaves") && ahead && ahead.after === shownId()) {
    headers["X-Ratchet-Shown"] = shownId(ahead.card);
    aside = goAhead();
  } else {
    stage.setAttribute("aria-busy", "true");
  }
  try {
    const answer = await fetch(target, { method: "POST", body, headers, credentials: "same-origin" });
    if (answer.headers.get("X-Ratchet-Card") !== "1") {
      // signed out, or the server is in trouble: its own page says so
      goBack(aside);
      if (answer.redirected) location.assign(answer.url);
      else announce(`Not saved: the server answered ${answer.status}. Try again.`);
      return;
    }
    const card = fragment(await answer.text());
    if (aside && answer.ok && shownId(card) === shownId()) {
      // the card in front stays, with whatever was begun on it; what was done and how far it is come is new
      for (const part of [".progress", ".said", '[data-key="u"]']) {
        const old = stage.querySelector(part);
        const fresh = card.querySelector(part);
        if (old && fresh) old.replaceWith(fresh);
      }
    } else {
      show(card);
    }
    // the address may still name what was just rated (after an undo): a reload shall show the queue
    const here = new URL(location);
    const named = here.searchParams.get("decision");
    here.searchParams.delete("said");
    if (shownId() && named !== shownId()) here.searchParams.delete("decision");
    history.replaceState(null, "", here);
    fetching = fetchAhead();
  } catch (error) {
    // the form still carries its id, so that sending it again stores one rating
    goBack(aside);
    announce(`Not saved: ${error.message}. Check the connection and try again.`);
  } finally {
    busy = false;
    stage.removeAttribute("aria-busy");
    const key = waiting;
    waiting = "";
    if (key && !typing(document.activeElement)) act(key);
  }
}

stage.addEventListener("submit", (event) => {
  if (!event.submitter || event.target.method !== "post") return;
  event.preventDefault();
  if (!busy) send(event.target, event.submitter);
});

stage.addEventListener("click", (event) => {
  if (event.target.closest('[data-key="?"]')) keys.showModal();
});

function typing(target) {
  if (!(target instanceof Element)) return false;
  return target.matches('textarea, select, input:not([type="checkbox"])') || target.isContentEditable;
}

// A key presses the button that carries it, or goes to the field whose place carries it.
function act(key) {
  const button = stage.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (button) {
    if (!button.disabled) button.click();
    return true;
  }
  const place = stage.querySelector(`[data-goto-key="${CSS.escape(key)}"]`);
  if (place) {
    if (place instanceof HTMLDetailsElement) place.open = true;
    place.querySelector('[name="pick"], select, textarea, input')?.focus();
  }
  return Boolean(place);
}

// While tags are picked (T, or a click on one), a digit picks the tag of that number and is never a verdict.
function pickTag(digit) {
  const tags = document.activeElement?.closest(".tags");
  if (!tags || !/^[0-9]$/.test(digit)) return false;
  const tag = tags.querySelectorAll('input[type="checkbox"]')[Number(digit) - 1];
  if (tag) {
    tag.focus();
    tag.click();
  }
  return true;
}

// Ctrl+Enter, on a Mac ⌘+Enter: the button that saves what is written in this field.
function saveField(field) {
  const button = field instanceof Element && field.closest("details")?.querySelector('[data-key="Control+Enter"]');
  if (button && !busy) button.click();
  return Boolean(button);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !keys.open && document.activeElement instanceof HTMLElement) {
    document.activeElement.blur();
    return;
  }
  if (event.defaultPrevented || event.isComposing || event.repeat) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !keys.open) {
    if (saveField(event.target)) event.preventDefault();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open || typing(event.target)) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (pickTag(key)) {
    event.preventDefault();
    return;
  }
  if (busy) {
    if (performance.now() - shownAt > READ_MS && !stage.hasAttribute("aria-busy")) waiting = key;
    return;
  }
  if (act(key)) event.preventDefault();
});

fetching = fetchAhead();
