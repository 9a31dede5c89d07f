export type Messages = string | { role: string; content: unknown; [more: string]: unknown }[];
export type Candidate = string | { response: string; score?: number };
export type Thumb = "up" | "down";

export interface Decision {
  id: string;
  agent: string;
  response: string;
  /** What the agent parsed from the response; null if it found nothing. */
  action?: Record<string, unknown> | null;
  policy: string;
  arm: string;
  /** Probability of this response, in (0, 1]; null for a written text. */
  propensity: number | null;
  [more: string]: unknown;
}

export interface ClientOptions {
  /** Address of the server, such as http://localhost:8000. */
  url: string;
  /** Key with the scopes `ingest` (decisions, outcomes) and `rate`. In a browser: a publishable, rate-only key. */
  apiKey?: string;
  /** Milliseconds for one request (default 30,000). */
  timeoutMs?: number;
  /** Repeats after no response, 408, 425, 429 or 5xx (default 4). */
  retries?: number;
}

/** A call repeated with the same `id` is stored once. */
interface Sent {
  id?: string;
}

export interface Rating extends Sent {
  thumb?: Thumb;
  stars?: 1 | 2 | 3 | 4 | 5;
  /** From 0 to 1. */
  score?: number;
  correction?: string;
  tags?: string[];
  notes?: string;
}

export class Client {
  constructor(agent: string, options: ClientOptions);
  decide(
    messages: Messages | null,
    options?: Sent & { state?: unknown; candidates?: Candidate[]; unit?: string; runId?: string; metadata?: object },
  ): Promise<Decision>;
  record(
    messages: Messages,
    response: unknown,
    options?: Sent & {
      policy?: string;
      candidates?: Candidate[];
      propensity?: number;
      unit?: string;
      runId?: string;
      tags?: string[];
      metadata?: object;
      latencyMs?: number;
    },
  ): Promise<Decision>;
  rate(
    decision: string | { id: string },
    rating: Rating & {
      /** Who rates; needs the scope `rate_as`. */
      rater?: string;
    },
  ): Promise<{ id: string; [more: string]: unknown }>;
  /** Rate the answer of a feedback token; the client needs no key. */
  feedback(token: string, rating: Rating): Promise<{ id: string; [more: string]: unknown }>;
  outcome(
    decision: string | { id: string },
    name: string,
    value: number | boolean,
    options?: Sent & { at?: string },
  ): Promise<{ id: string; [more: string]: unknown }>;
}

export class ServerUnavailable extends Error {
  id: string;
  status: number | null;
  retryAfterS: number | null;
}

export class RequestRefused extends Error {
  status: number;
  code: string;
  fields: Record<string, string>;
}
