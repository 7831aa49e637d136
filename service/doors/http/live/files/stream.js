// The stream of events: read with fetch, because an EventSource sends no key, and reconnected when it ends.

const SILENCE_MS = 5000; // an event or a keep-alive comes every quarter second
const LEAST_WAIT_MS = 500;
const MOST_WAIT_MS = 5000;

/** Calls `part(name, value)` for every event and `state(name, text)` as the connection changes:
 * "live"; "lost" (it retries); "key" (it waits for `use`). */
export class Stream {
  constructor(url, part, state) {
    this.url = url;
    this.part = part;
    this.state = state;
    this.key = "";
    this.number = 0; // of the current attempt; an older attempt ends
    this.control = new AbortController();
  }

  use(key) {
    this.key = key;
    this.start();
  }

  start() {
    this.stop();
    this.run(this.number);
  }

  stop() {
    this.number += 1;
    this.control.abort();
  }

  async run(number) {
    let wait = LEAST_WAIT_MS;
    while (number === this.number) {
      const ended = await this.once(number, () => (wait = LEAST_WAIT_MS));
      if (number !== this.number) return;
      if (ended.needsKey) {
        this.state("key", ended.text);
        return;
      }
      this.state("lost", `${ended.text} Trying again in ${wait / 1000} s.`);
      await new Promise((done) => setTimeout(done, wait));
      wait = Math.min(2 * wait, MOST_WAIT_MS);
    }
  }

  /** Reads one connection to its end; returns why it ended. */
  async once(number, begun) {
    const control = (this.control = new AbortController());
    let timer = 0;
    const hush = () => {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENCE_MS);
    };
    try {
      hush();
      const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
      const options = { headers, signal: control.signal, cache: "no-store" };
      const response = await fetch(this.url, options);
      if (!response.ok) return await refusal(response);
      begun();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || number !== this.number) return { text: "The service ended the connection." };
        hush();
        text = this.take(text + value, number);
      }
    } catch {
      return { text: "The service does not respond." };
    } finally {
      clearTimeout(timer);
    }
  }

  /** Hands on complete events; returns the rest of the text. */
  take(text, number) {
    const events = text.split("\n\n");
    const rest = events.pop();
    for (const event of events) {
      if (number !== this.number || event.startsWith(":")) continue;
      const lines = event.split("\n");
      const [name, data] = lines.map((line) => line.slice(line.indexOf(": ") + 2));
      this.part(name, JSON.parse(data));
    }
    if (events.length && number === this.number) this.state("live", "");
    return rest;
  }
}

async function refusal(response) {
  const problem = await response.json().catch(() => ({}));
  const text = problem.detail ?? `The service replied with status ${response.status}.`;
  return { text, needsKey: response.status === 401 || response.status === 403 };
}
