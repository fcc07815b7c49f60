// Talks to the server: requests, and streams of server-sent events.

let key = "";

export function useKey(value) {
  key = value;
}

// Returns the response, and throws an error with the server's message if it refuses.
export async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers, signal });
  if (response.ok) return response;
  const error = new Error(await failure(response));
  error.status = response.status;
  throw error;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

// Yields the JSON values of a stream of server-sent events. Throws if the stream reports an error or breaks off.
export async function* events(response) {
  const decoder = new TextDecoder();
  let held = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    held += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // comments keep the connection alive
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    if (done) throw new Error("the stream ended before the text did");
  }
}
