// Markdown as models write it, made of elements: no text becomes HTML, so none can be harmful.

const MOST_DEPTH = 8; // of quotes, lists and emphasis in one another; deeper ones stay text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DIVIDER = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
const INLINE = new RegExp(
  [
    "(?<ticks>`+)(?!`)(?<code>[^]*?[^`])\\k<ticks>(?!`)",
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
    "(?<strong>\\*\\*|(?<!\\w)__)(?=\\S)(?<bold>[^]*?\\S)\\k<strong>(?!\\w|\\*)",
    "(?<weak>\\*|(?<!\\w)_)(?=[^\\s*_])(?<italic>[^]*?\\S)\\k<weak>(?!\\w)",
    "~~(?=\\S)(?<deleted>[^]*?\\S)~~",
    "!?\\[(?<label>[^\\]\\n]+)\\]\\((?<target>[^\\s()]*(?:\\([^\\s()]*\\)[^\\s()]*)*)\\)",
    "(?<url>https?://[^\\s<>()]*[^\\s<>().,;:!?'\"*_])",
  ].join("|"),
  "g",
);

/** Shows `text` in `parent`. Blocks that were there before and are the same are kept, so a growing answer
 * costs its last block, and a selection stays. */
export function show(parent, text) {
  const blocks = blocksOf(text.split(/\r?\n/));
  blocks.forEach((block, at) => {
    const source = block.lines.join("\n");
    const old = parent.children[at];
    if (old?.source === source) return;
    const made = elementOf(block, 0);
    made.source = source;
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const from = at;
    const kind = kindOf(lines, at);
    at += 1;
    if (kind === "code") {
      const [, fence] = FENCE.exec(lines[from]);
      while (at < lines.length && !closes(lines[at], fence)) at += 1;
      at += 1;
    } else if (kind === "list") {
      while (at < lines.length && continuesList(lines, at)) at += 1;
    } else if (kind === "quote") {
      while (at < lines.length && QUOTE.test(lines[at])) at += 1;
    } else if (kind === "table") {
      while (at < lines.length && lines[at].includes("|")) at += 1;
    } else if (kind === "paragraph") {
      while (at < lines.length && kindOf(lines, at) === "paragraph") at += 1;
    }
    if (kind !== "blank") blocks.push({ kind, lines: lines.slice(from, at) });
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

/** A list goes on with items, with indented lines, and with lines that continue a paragraph. */
function continuesList(lines, at) {
  const line = lines[at];
  if (!line.trim()) {
    const next = lines.slice(at + 1).find((one) => one.trim());
    return next !== undefined && (ITEM.test(next) || /^ {2,}/.test(next));
  }
  return ITEM.test(line) || /^( {2,}|\t)/.test(line) || (lines[at - 1].trim() && kindOf(lines, at) === "paragraph");
}

function elementOf({ kind, lines }, depth) {
  if (kind === "code") return codeBlock(lines);
  if (kind === "rule") return document.createElement("hr");
  if (kind === "table") return table(lines, depth);
  if (kind === "list") return list(lines, depth);
  if (kind === "quote") {
    const quote = document.createElement("blockquote");
    fill(quote, lines.map((line) => line.replace(QUOTE, "")), depth + 1);
    return quote;
  }
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return inline(document.createElement(`h${Math.min(marks.length + 2, 6)}`), text, depth);
  }
  return inline(document.createElement("p"), lines.join("\n"), depth);
}

function fill(parent, lines, depth) {
  if (depth > MOST_DEPTH) {
    parent.append(lines.join("\n"));
    return;
  }
  const blocks = blocksOf(lines);
  const [first] = blocks;
  if (first?.kind === "paragraph" && parent.localName === "li") {
    inline(parent, first.lines.join("\n"), depth);
    blocks.shift();
  }
  parent.append(...blocks.map((block) => elementOf(block, depth)));
}

function list(lines, depth) {
  const [, , mark] = ITEM.exec(lines[0]);
  const number = parseInt(mark, 10);
  const found = document.createElement(isNaN(number) ? "ul" : "ol");
  if (number > 1) found.start = number;
  const items = [];
  let inset = 0;
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && (!items.length || match[1].length < 2)) {
      inset = match[0].trimEnd().length + 1;
      items.push([line.slice(match[0].length)]);
    } else {
      const spaces = line.length - line.trimStart().length;
      items[items.length - 1].push(line.slice(Math.min(spaces, inset)));
    }
  }
  for (const item of items) {
    const element = document.createElement("li");
    fill(element, item, depth + 1);
    found.append(element);
  }
  return found;
}

function codeBlock(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && closes(lines[lines.length - 1], fence);
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const code = document.createElement("code");
  const pre = document.createElement("pre");
  caption.textContent = language.trim().split(/\s/)[0] || "code";
  code.textContent = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  pre.tabIndex = 0; // so that the keyboard scrolls it
  pre.append(code);
  figure.append(caption, pre);
  return figure;
}

function table(lines, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const found = document.createElement("table");
  const row = (section, line, name) => {
    const made = section.insertRow();
    for (const cell of cells(line)) made.append(inline(document.createElement(name), cell, depth));
  };
  row(found.createTHead(), lines[0], "th");
  const body = found.createTBody();
  for (const line of lines.slice(2)) row(body, line, "td");
  const box = document.createElement("div");
  box.className = "wide";
  box.append(found);
  return box;
}

/** Appends text with its emphasis, code and links. */
function inline(parent, text, depth) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(from, match.index), piece(match, depth));
    from = match.index + match[0].length;
  }
  parent.append(text.slice(from));
  return parent;
}

function piece(match, depth) {
  const { code, escaped, bold, italic, deleted, label, target, url } = match.groups;
  const within = (name, text) =>
    depth >= MOST_DEPTH ? match[0] : inline(document.createElement(name), text, depth + 1);
  if (escaped !== undefined) return escaped;
  if (bold !== undefined) return within("strong", bold);
  if (italic !== undefined) return within("em", italic);
  if (deleted !== undefined) return within("del", deleted);
  if (code !== undefined) {
    const element = document.createElement("code");
    element.textContent = code.replace(/^ (.*) $/, "$1");
    return element;
  }
  if (!/^(https?:\/\/|mailto:)/i.test(url ?? target)) return match[0];
  const link = document.createElement("a");
  link.href = url ?? target;
  link.textContent = url ?? label;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}
