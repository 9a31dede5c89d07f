/** Client of Ratchet's REST API for Node 18 and newer and for browsers: decide, record, rate, outcome. */

/** No usable response came: the server is unreachable, busy or failing. A repeat with `id` is stored once. */
export class ServerUnavailable extends Error {
  constructor(message, { id, status = null, retryAfterS = null, cause } = {}) {
    super(message, { cause });
    this.name = "ServerUnavailable";
    Object.assign(this, { id, status, retryAfterS });
  }
}

/** The server refused the request. The same request would be refused again. */
export class RequestRefused extends Error {
  constructor(message, { status, code, fields }) {
    super(message);
    this.name = "RequestRefused";
    Object.assign(this, { status, code, fields });
  }
}

const AGENT = /^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$/;
const AGAIN = new Set([408, 425, 429, 500, 502, 503, 504]);
const LONGEST_WAIT_S = 60;

const random = globalThis.crypto ?? (await import("node:crypto")).webcrypto; // Node 18 has no global

/** A random UUID, also in pages without TLS, where browsers have no `randomUUID`. */
function uuid() {
  const bytes = random.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
const given = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined && value !== null));

export class Client {
  constructor(agent, { url, apiKey, timeoutMs = 30_000, retries = 4 } = {}) {
    if (!AGENT.test(agent)) {
      throw new TypeError(`expected an agent of 1 to 64 lower-case letters, digits, - and _, found ${JSON.stringify(agent)}`);
    }
    if (!/^https?:\/\/[^?#]+$/.test(url ?? "")) {
      throw new TypeError(`expected a url such as http://localhost:8000, found ${JSON.stringify(url)}`);
    }
    Object.assign(this, { agent, url: url.replace(/\/+$/, ""), timeoutMs, retries });
    this.headers = { "Content-Type": "application/json", ...(apiKey ? { Authorization: `Bearer ${apiKey}` } : {}) };
  }

  /** Ask for a decision: the server assigns a policy, answers and records it. */
  async decide(messages, { state, candidates, unit, runId, metadata, id } = {}) {
    if (messages == null && state == null) throw new TypeError("expected messages or a state to decide about, found neither");
    return this.#post("/api/decide/", given({ agent: this.agent, messages, state, candidates, unit, run_id: runId, metadata }), id);
  }

  /** Record a decision that the app took itself. */
  async record(messages, response, { policy, candidates, propensity, unit, runId, tags, metadata, latencyMs, id } = {}) {
    const facts = { policy, candidates, propensity, unit, run_id: runId, tags, metadata, latency_ms: latencyMs };
    return this.#post("/api/decisions/", given({ agent: this.agent, messages, response, ...facts }), id);
  }

  /** Rate a decision, or its id, by thumb, stars 1 to 5, score 0 to 1, a better response, tags or notes. */
  async rate(decision, { rater, id, ...rating } = {}) {
    return this.#post(`/api/decisions/${idOf(decision)}/ratings/`, given({ ...said(rating), rater }), id);
  }

  /** Rate the answer that a feedback token stands for. Needs no key. */
  async feedback(token, { id, ...rating } = {}) {
    if (!/^[\w.:-]+$/.test(token ?? "")) throw new TypeError(`expected a feedback token, found ${JSON.stringify(token)}`);
    return this.#post(`/api/feedback/${token}`, said(rating), id);
  }

  /** Report a measured result of a decision, such as "ticket_reopened". True is 1. */
  async outcome(decision, name, value, { at, id } = {}) {
    if (!Number.isFinite(Number(value))) throw new TypeError(`value: expected a finite number, found ${value}`);
    return this.#post(`/api/decisions/${idOf(decision)}/outcomes/`, given({ name, value: Number(value), at }), id);
  }

  /** Send a body under one id until it is answered, so that a repeat is stored once. */
  async #post(path, body, id = uuid()) {
    const sent = JSON.stringify({ id, ...body });
    for (let attempt = 0; ; attempt += 1) {
      const failure = await this.#once(path, sent, id);
      if (!(failure instanceof ServerUnavailable)) return failure;
      if (attempt >= this.retries) throw failure;
      await wait(Math.min(failure.retryAfterS ?? 0.2 * 2 ** attempt, LONGEST_WAIT_S));
    }
  }

  /** The answer's JSON, or the reason to send again. */
  async #once(path, body, id) {
    let answer;
    let text;
    try {
      const signal = AbortSignal.timeout(this.timeoutMs);
      answer = await fetch(this.url + path, { method: "POST", headers: this.headers, body, signal });
      text = await answer.text();
    } catch (cause) {
      return new ServerUnavailable(`no response from ${this.url}: ${cause.message}`, { id, cause });
    }
    const found = parsed(text);
    if (answer.ok && found) return found;
    const { status } = answer;
    const said = found?.error ?? {};
    if (answer.ok) {
      const message = `expected JSON from ${this.url}${path}, found ${JSON.stringify(text.slice(0, 80))}; check the url`;
      throw new RequestRefused(message, { status, code: "not_json", fields: {} });
    }
    const message = said.message ?? `${this.url} answered ${status}`;
    if (AGAIN.has(status)) {
      const asked = Number.parseFloat(answer.headers.get("Retry-After") ?? "");
      return new ServerUnavailable(message, { id, status, retryAfterS: Number.isFinite(asked) ? asked : null });
    }
    throw new RequestRefused(message, { status, code: said.code ?? "", fields: said.fields ?? {} });
  }
}

function said({ thumb, stars, score, correction, tags, notes }) {
  const found = given({ thumb, stars, score, correction, tags, notes });
  if (!Object.keys(found).length) {
    throw new TypeError("expected at least one of thumb, stars, score, correction, tags and notes, found none");
  }
  return found;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function idOf(decision) {
  const id = typeof decision === "string" ? decision : decision?.id;
  if (!/^[0-9a-f-]{32,36}$/i.test(id ?? "")) {
    throw new TypeError(`expected a decision or its id, found ${JSON.stringify(decision)}`);
  }
  return id;
}
