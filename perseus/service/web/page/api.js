/** Calls to the coordinator, the same as gRPC's, and the errors of those that fail. */

/** A call that was refused or not answered. `code` is gRPC's, or "OFFLINE" without an answer. */
export class CallError extends Error {
  constructor(code, reason, message, metadata = {}) {
    super(message);
    this.name = "CallError";
    this.code = code;
    this.reason = reason;
    this.metadata = metadata;
  }
}

/** The page's session: its user, and whether they may control jobs. */
export const session = {
  show: () => send("GET", "session"),
  login: (token) => send("POST", "session", { token }),
  logout: () => send("DELETE", "session"),
};

/** One method of a service; request and response are the messages of protos/perseus/v1 as JSON. */
export function call(service, method, request) {
  return send("POST", `api/${service}/${method}`, request);
}

/** The slots of the fleet: who serves each, and the jobs of all but this coordinator's. */
export async function otherSlots() {
  return (await send("GET", "api/fleet")).slots;
}

/** The ranks of a job in columns. */
export function ranks(jobId) {
  return send("GET", `api/ranks/${encodeURIComponent(jobId)}`);
}

/** All pages of a listing with the `field` of each joined, up to so many pages. */
export async function pages(service, method, request, field, mostPages = 10) {
  const found = [];
  let last = {};
  let token = "";
  for (let page = 0; page < mostPages; page += 1) {
    last = await call(service, method, token ? { ...request, page_token: token } : request);
    found.push(...(last[field] ?? []));
    token = last.next_page_token ?? "";
    if (!token) break;
  }
  return { ...last, [field]: found };
}

async function send(method, path, body) {
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      signal: AbortSignal.timeout(30_000),
    });
  } catch {
    throw new CallError("OFFLINE", "", "The coordinator does not answer.");
  }
  if (response.ok) return response.status === 204 ? {} : response.json();
  const problem = await response.json().catch(() => ({}));
  const error = new CallError(
    problem.code ?? `HTTP ${response.status}`,
    problem.reason ?? "",
    problem.message ?? `The coordinator answered ${response.status}.`,
    problem.metadata,
  );
  if (response.status === 401 && path !== "session") document.dispatchEvent(new CustomEvent("session-ended"));
  throw error;
}
