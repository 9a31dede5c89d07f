// The rating page: keys, and the next card swapped in without loading the page again.
// Everything here is also a plain form: with scripts blocked the page works, one load per rating.
"use strict";

document.documentElement.classList.add("scripted");

const stage = document.getElementById("stage");
const keys = document.getElementById("keys");
let busy = false;

const form = () => document.getElementById("rate-form");
const button = (selector) => stage.querySelector(selector);

function press(selector) {
  const found = button(selector);
  if (found && !found.disabled) found.click();
}

function announce(text) {
  const said = stage.querySelector(".said");
  if (said) said.textContent = text;
}

async function send(sent, submitter) {
  const body = new FormData(sent, submitter);
  const target = submitter.getAttribute("formaction") || sent.getAttribute("action");
  busy = true;
  stage.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(target, {
      method: "POST", body, headers: { "X-Ratchet-Card": "1" }, credentials: "same-origin",
    });
    if (answer.headers.get("X-Ratchet-Card") !== "1") {
      // signed out, or the server is in trouble: its own page says so
      if (answer.redirected) location.assign(answer.url);
      else announce(`Not saved: the server answered ${answer.status}. Try again.`);
      return;
    }
    stage.innerHTML = await answer.text();
    // the address may still name the decision just rated (after an undo): a reload shall show the queue
    const agent = new FormData(sent).get("agent");
    const shown = stage.querySelector(`[name="decision"]`);
    if (shown && new URL(location).searchParams.get("decision") !== shown.value) {
      history.replaceState(null, "", agent ? `?agent=${encodeURIComponent(agent)}` : location.pathname);
    }
    window.scrollTo(0, 0);
    const title = document.getElementById("asked");
    if (title) title.focus({ preventScroll: true });
  } catch (error) {
    // the form still carries its id, so that sending it again stores one rating
    announce(`Not saved: ${error.message}. Check the connection and try again.`);
  } finally {
    busy = false;
    stage.removeAttribute("aria-busy");
  }
}

stage.addEventListener("submit", (event) => {
  if (!event.submitter) return;
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

function openAndFocus(selector, field) {
  const place = stage.querySelector(selector);
  if (!place) return;
  if (place instanceof HTMLDetailsElement) place.open = true;
  const target = place.querySelector(field);
  if (target) target.focus();
}

const ACTIONS = {
  ArrowUp: () => press('[name="verdict"][value="up"]'),
  ArrowDown: () => press('[name="verdict"][value="down"]'),
  c: () => openAndFocus(".correct", "select, textarea"),
  t: () => openAndFocus(".tags", "input"),
  n: () => openAndFocus(".notes", "textarea"),
  s: () => press('[data-key="s"]'),
  u: () => press('[data-key="u"]'),
  "?": () => keys.showModal(),
};
for (const star of "12345") ACTIONS[star] = () => press(`[name="verdict"][value="${star}"]`);

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !keys.open && document.activeElement instanceof HTMLElement) {
    document.activeElement.blur();
    return;
  }
  if (event.defaultPrevented || event.isComposing || event.repeat) return;
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open || busy || typing(event.target)) return;
  const action = ACTIONS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
