// Server-sent events of OpenAI's API: asks, and yields each chunk as an object until [DONE].
// Addresses are relative to this file's own, so that they hold behind a proxy's prefix too.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function* ask(path, body, key, signal) {
  const response = await fetch(addressOf(path), { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    yield chunk;
  }
  throw new Error("the connection ended before the answer did");
}

export async function get(path, key) {
  const response = await fetch(addressOf(path), { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

const addressOf = (path) => new URL(`..${path}`, import.meta.url);

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answered ${response.status}`;
  const wait = response.headers.get("Retry-After");
  return new Refused(response.status, wait ? `${message} (try again in ${wait} s)` : message);
}

// The data of each event. Bytes come in pieces that respect neither characters nor lines.
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let text = "", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      text += decoder.decode(value, { stream: !done });
      const lines = text.split(/\r\n|\n|\r(?!$)/);
      text = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
