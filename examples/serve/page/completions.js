// A chat completion as it comes, and errors in words for the reader of the page.

/** An error whose message is a sentence for the page. */
export class Failure extends Error {}

/** Sends a request; yields the reply's chunks. Raises Failure, or AbortError when `signal` ends it. */
export async function* complete(request, signal) {
  const options = {
    method: "POST",
    signal,
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
  };
  const response = await orFailure(fetch("v1/chat/completions", options), "The server does not answer. Is it still running?");
  if (!response.ok) throw new Failure(await words(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const broken = "The connection ended before the answer did.";
  for (let rest = ""; ; ) {
    const { done, value } = await orFailure(reader.read(), broken);
    if (done) throw new Failure(broken);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(`The answer failed: ${chunk.error.message}.`);
      yield chunk;
    }
  }
}

async function orFailure(promise, text) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(text);
  }
}

async function words(response) {
  const reply = await response.json().catch(() => null);
  const message = reply?.error?.message ?? `status ${response.status}`;
  if (response.status === 429) return "The server has as many requests as it takes. Try again in a second.";
  if (response.status >= 500) return `The server has a problem: ${message}.`;
  return `The server did not accept this: ${message}.`;
}
