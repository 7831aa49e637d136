// The chat page: several chats side by side, with the numbers of each answer and what all of them share.

import { due } from "../live/canvas.js";
import { exact, share } from "../live/format.js";
import { useTheme } from "../live/theme.js";
import { Icicle } from "../live/tree.js";
import { complete } from "./completions.js";
import { show } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const facts = JSON.parse(document.body.dataset.facts);
const EXAMPLES = [
  ["Plan", "Give me three tips for a good night's sleep."],
  ["Code", "Write a Python function that counts the vowels in a word."],
  ["Explain", "Explain in a few sentences why the sky is blue."],
];
const SYSTEM =
  "You are a helpful and careful assistant. Begin with the answer itself: no greeting, and no repetition of " +
  "the question. Write plain English in short sentences, and explain a word that a beginner may not know. " +
  "Use Markdown where it helps: a numbered list for steps, bullets for things that have no order, and a fenced " +
  "code block with its language for code. If you do not know something, say so; never invent names, dates or " +
  "numbers. Keep an answer below one hundred and fifty words, unless the user asks for more.";
const WATCH_MS = { busy: 500, idle: 3000 };
const LEVELS = 5;
const NEAR = 60; // pixels from the end: a reader who is there follows the answer

function element(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

function button(label, act, className = "quiet") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

// One chat: its messages as the model gets them, and its part of the page.

class Chat {
  constructor() {
    this.messages = [];
    this.view = element("div", "chat");
    this.tab = element("li");
    this.control = null; // of the answer that is being made
    this.last = null; // the last answer's element
    this.draft = "";
    this.promptTokens = 0;
    this.cachedTokens = 0;
  }

  get title() {
    return this.messages.find((one) => one.role === "user")?.content ?? "New chat";
  }

  get isEmpty() {
    return !this.view.hasChildNodes();
  }

  /** Sends a question. A question before it without any answer is taken back. */
  async ask(question) {
    if (!this.messages.length && byId("system").value.trim()) {
      this.messages.push({ role: "system", content: byId("system").value.trim() });
    }
    if (this.messages.at(-1)?.role === "user") {
      this.messages.pop();
      this.last.remove();
      this.view.lastChild.remove();
    }
    this.messages.push({ role: "user", content: question });
    this.last?.querySelector(".retry")?.remove();
    this.view.append(element("article", "user", element("h3", "unseen", "You"), element("p", "", question)));
    await this.answer();
  }

  async retry() {
    if (this.messages.at(-1).role === "assistant") this.messages.pop();
    this.last.remove();
    byId("text").focus();
    await this.answer();
  }

  stop() {
    this.control?.abort();
  }

  async answer() {
    const answer = new Answer(this);
    this.last = answer.element;
    this.control = new AbortController();
    follow(() => this.view.append(answer.element), true);
    showChats();
    look();
    await answer.run(this.messages, this.control.signal);
    this.control = null;
    if (answer.text) this.messages.push({ role: "assistant", content: answer.text });
    follow(() => answer.acts.append(button("Retry", () => this.retry(), "quiet retry")));
    announce(this === current ? answer.spoken : `${this.title}: the answer is there.`);
    showChats();
    look();
  }
}

// An answer as it grows, and its numbers.

class Answer {
  constructor(chat) {
    this.chat = chat;
    this.text = "";
    this.spoken = "";
    this.body = element("div", "text");
    this.wait = element("p", "wait", element("i"), element("i"), element("i"), element("span", "", "Waiting for the model"));
    this.numbers = element("p", "numbers");
    this.acts = element("div", "acts");
    this.element = element(
      "article",
      "answer",
      element("h3", "unseen", "Answer"),
      this.wait,
      this.body,
      element("footer", "", this.numbers, this.acts),
    );
    this.element.ariaBusy = "true";
  }

  async run(messages, signal) {
    const begun = performance.now();
    const clock = setInterval(() => this.sayWait(performance.now() - begun), 1000);
    let [first, count, usage, finish] = [0, 0, null, null];
    announce("Waiting for the answer");
    try {
      for await (const chunk of complete({ model: facts.model, messages }, signal)) {
        usage = chunk.usage ?? usage;
        const [choice] = chunk.choices;
        if (!choice) continue;
        finish = choice.finish_reason ?? finish;
        this.grow(choice.delta.content ?? "");
        first ||= performance.now();
        count += 1;
        this.numbers.textContent = rate(count, first) ?? "";
      }
      if (finish === "length") this.note(`Cut off after ${exact(usage.completion_tokens)} tokens, the most of one answer.`);
      this.spoken = `Answer: ${this.text}`;
    } catch (error) {
      if (error.name === "AbortError") this.note("Stopped.");
      else this.note(error.message, "error");
    }
    clearInterval(clock);
    this.wait.remove();
    this.element.ariaBusy = "false";
    if (usage) this.showNumbers(usage, first, first - begun);
  }

  sayWait(ms) {
    this.wait.lastChild.textContent = `Waiting for the model, ${Math.round(ms / 1000)} s`;
  }

  grow(text) {
    if (!text) return;
    this.wait.remove();
    this.text += text;
    follow(() => show(this.body, this.text));
  }

  note(text, kind = "note") {
    this.spoken = text;
    follow(() => this.element.lastChild.before(element("p", kind, text)));
  }

  showNumbers({ completion_tokens: made, prompt_tokens: prompt, prompt_tokens_details: { cached_tokens: cached } }, first, wait) {
    const meter = element("span", "meter", element("i"));
    meter.firstChild.style.width = share(cached, prompt);
    meter.ariaHidden = "true";
    const words = [rate(made, first), `${exact(made)} tokens`, `first after ${(wait / 1000).toFixed(2)} s`];
    const cachedWords = element("span", "", `${exact(cached)} of ${exact(prompt)} prompt tokens cached`);
    cachedWords.prepend(meter);
    follow(() => this.numbers.replaceChildren(...words.filter(Boolean).map((one) => element("span", "", one)), cachedWords));
    this.chat.promptTokens += prompt;
    this.chat.cachedTokens += cached;
    this.acts.prepend(copyButton(() => this.text));
  }
}

/** Tokens per second since the first one, of which there must be some. */
function rate(count, first) {
  const seconds = (performance.now() - first) / 1000;
  return count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : null;
}

function copyButton(textOf) {
  const made = button("Copy", async () => {
    await navigator.clipboard.writeText(textOf());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  made.hidden = !navigator.clipboard;
  return made;
}

// All chats: which is shown, and the list of them.

let chats = [];
let current = null;

function open(chat) {
  if (current) current.draft = byId("text").value;
  if (!chats.includes(chat)) {
    chats.push(chat);
    byId("chats").append(chat.tab);
  }
  current = chat;
  byId("text").value = chat.draft;
  for (const one of byId("log").querySelectorAll(".chat")) one.remove();
  byId("log").append(chat.view);
  showChats();
  follow(undefined, true);
  chat.tab.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function close(chat) {
  chat.stop();
  chat.tab.remove();
  const at = chats.indexOf(chat);
  chats = chats.filter((one) => one !== chat);
  if (chat === current) open(chats[Math.min(at, chats.length - 1)] ?? new Chat());
  else showChats();
  byId("text").focus();
}

function newChat() {
  open(chats.find((one) => one.isEmpty) ?? new Chat());
  byId("text").focus();
}

function askAll() {
  const asked = EXAMPLES.map(([, question], at) => {
    const chat = at ? new Chat() : current;
    open(chat);
    return [chat, question];
  });
  for (const [chat, question] of asked) chat.ask(question);
  open(asked[0][0]);
  byId("shared").open = true;
}

function showChats() {
  for (const chat of chats) {
    if (!chat.tab.hasChildNodes()) {
      chat.tab.append(button("", () => open(chat), "tab"), button("×", () => close(chat), "close"));
    }
    const [tab, end] = chat.tab.children;
    tab.textContent = chat.title;
    tab.title = chat.title;
    tab.classList.toggle("busy", Boolean(chat.control));
    tab.ariaCurrent = chat === current ? "true" : null;
    end.hidden = chat.isEmpty && chats.length === 1;
    end.ariaLabel = `Close chat: ${chat.title}`;
  }
  byId("welcome").hidden = !current.isEmpty;
  const isBusy = Boolean(current.control);
  byId("send").textContent = isBusy ? "Stop" : "Send";
  byId("send").classList.toggle("stop", isBusy);
  const sum = (name) => chats.reduce((total, chat) => total + chat[name], 0);
  const [prompt, cached] = [sum("promptTokens"), sum("cachedTokens")];
  byId("prompt-tokens").textContent = exact(prompt);
  byId("cached-tokens").textContent = prompt ? `${exact(cached)} · ${share(cached, prompt)}` : "0";
  byId("share").textContent = prompt ? `${share(cached, prompt)} cached` : "";
}

/** Shows a change of the chat: a reader who is at its end stays there; `always` scrolls there. */
function follow(change = () => {}, always = false) {
  const scroller = byId("scroller");
  const isNear = scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop < NEAR;
  change();
  if (isNear || always) scroller.scrollTop = current.isEmpty ? 0 : scroller.scrollHeight;
}

function announce(text) {
  byId("announce").textContent = text;
}

// What attnd's pool has: its tree, as the live page draws it.

const tree = (globalThis.tree = new Icicle(byId("tree"), byId("legend"), byId("tree-read"), LEVELS));

async function watch() {
  const isBusy = chats.some((chat) => chat.control);
  if (!document.hidden && byId("shared").open) await look();
  setTimeout(watch, isBusy ? WATCH_MS.busy : WATCH_MS.idle);
}

async function look() {
  const response = await fetch("tree").catch(() => null);
  const found = await response?.json().catch(() => null);
  byId("trouble").hidden = Boolean(response?.ok && found);
  if (!response?.ok || !found) {
    const why = found?.error?.message ?? found?.error;
    byId("trouble").textContent = why ? `attnd shows no pool: ${why}` : "The server does not answer.";
    return;
  }
  tree.setPool(found.pool);
  tree.set({ ...found, namespaces: found.namespaces.map((name) => (name === "default" ? "pool" : name)) });
  byId("pages").textContent = `${exact(found.pool.total - found.pool.free)} of ${exact(found.pool.total)}`;
}

// The page.

function submit(event) {
  event.preventDefault();
  if (current.control) {
    current.stop();
    return;
  }
  const question = byId("text").value.trim();
  byId("text").value = "";
  if (question) current.ask(question);
}

byId("form").addEventListener("submit", submit);
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
addEventListener("keydown", (event) => event.key === "Escape" && current.stop());
byId("new").addEventListener("click", newChat);
byId("all").addEventListener("click", askAll);
byId("shared").addEventListener("toggle", look);
new ResizeObserver(() => due(tree)).observe(byId("tree"));
document.addEventListener("visibilitychange", () => document.hidden || look());

byId("system").value = SYSTEM;
byId("model").textContent = facts.model;
byId("live").hidden = !facts.live;
byId("live").href = facts.live;
const sampling = facts.temperature ? `temperature ${facts.temperature}, top-p ${facts.top_p}` : "the most likely words";
byId("limits").append(
  element("span", "keys", "Enter sends, Shift+Enter begins a line. "),
  `At most ${exact(facts.max_tokens)} tokens an answer; ${sampling}.`,
);
for (const [kind, question] of EXAMPLES) {
  const one = button("", () => current.ask(question), "example");
  one.append(element("b", "", kind), element("span", "", question));
  byId("examples").append(element("li", "", one));
}
const isNarrow = matchMedia("(max-width: 1099px)");
byId("shared").open = !isNarrow.matches;
isNarrow.addEventListener("change", () => (byId("shared").open = !isNarrow.matches));
useTheme(byId("theme"), [tree]);
open(new Chat());
watch();
