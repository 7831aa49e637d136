// The prefix tree as an icicle: a part is as wide as the pages at and below it; what its children leave
// uncovered are its own. Its colour is its last use, its label the sequences that share it.

import { begin, colour, due, emptyNote, mix, rgb, setHeight } from "./canvas.js";
import { age, count, exact, plural } from "./format.js";
import { STATES } from "./map.js";

const AXIS = 18;
const ROW = 25;
const MOST_LEVELS = 9;
const AGES = [1, 10, 60, 600, 3600]; // seconds, one for each colour
const AGE_WORDS = ["now", "10 s", "1 min", "10 min", "1 h"];

export class Icicle {
  constructor(canvas, legend, read) {
    this.canvas = canvas;
    this.read = read;
    this.parts = [];
    this.boxes = [];
    this.cursor = -1;
    this.total = 0;
    this.levels = 4; // rows that there is room for: it grows and does not shrink, so that nothing jumps
    this.scale = document.createElement("canvas");
    this.note = document.createElement("span");
    const words = document.createElement("span");
    words.append("last use: now ", this.scale, " 1 h ago and more");
    const label = document.createElement("span");
    label.textContent = "×n: sequences that share it";
    legend.append(words, label, this.note);
    canvas.addEventListener("pointermove", (event) => this.point(this.partAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("blur", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  set(tree) {
    this.parts = tree.parents.map((parent, at) => ({
      parent,
      name: tree.namespaces[at] ?? "",
      pages: tree.pages[at],
      total: tree.totals[at],
      sequences: tree.sequences[at],
      idle: tree.idle_s[at],
      state: tree.states[at],
      children: [],
    }));
    for (const [at, part] of this.parts.entries()) {
      if (part.parent >= 0) this.parts[part.parent].children.push(at);
    }
    if (this.cursor >= this.parts.length) this.cursor = -1;
    this.tell();
    due(this);
  }

  /** What the whole is measured by: pages in use. */
  setPool(pool) {
    this.used = pool.total - pool.free;
    this.nodes = pool.nodes;
  }

  themeChanged() {
    this.ages = null;
    due(this);
  }

  /** Boxes from left to right, row by row; `x` and `width` in pages. */
  layout() {
    const roots = this.parts.flatMap((part, at) => (part.parent < 0 ? [at] : []));
    this.total = roots.reduce((sum, at) => sum + this.parts[at].total, 0);
    this.boxes = [];
    let row = roots;
    let begins = new Map();
    let x = 0;
    for (const at of roots) {
      begins.set(at, x);
      x += this.parts[at].total;
    }
    for (let depth = 0; row.length; depth++) {
      const next = [];
      for (const at of row) {
        const part = this.parts[at];
        let from = begins.get(at);
        this.boxes.push({ at, depth, x: from, width: part.total });
        for (const child of part.children) {
          begins.set(child, from);
          from += this.parts[child].total;
          next.push(child);
        }
        const folded = begins.get(at) + part.total - part.pages - from;
        if (folded > 0) this.boxes.push({ at: -1, depth: depth + 1, x: from, width: folded });
      }
      row = next;
    }
  }

  draw() {
    this.drawScale();
    this.layout();
    const deepest = this.boxes.reduce((most, box) => Math.max(most, box.depth), 0);
    this.levels = Math.min(Math.max(this.levels, deepest + 1), MOST_LEVELS);
    setHeight(this.canvas, this.levels * ROW + AXIS);
    const { context, width, height } = begin(this.canvas);
    const used = this.used ?? 0;
    const beyond = used - this.total;
    this.note.textContent =
      this.total && beyond > 0.005 * used ? `${exact(this.total)} of ${exact(used)} pages in use are in the parts shown` : "";
    if (!this.total) {
      emptyNote(context, "no pages in use", 0, 0, width, height);
      return;
    }
    this.wide = width / this.total;
    for (const box of this.boxes) {
      if (box.depth < this.levels) this.drawBox(context, box);
    }
    this.drawAxis(context, width, height);
  }

  drawBox(context, { at, depth, x, width }) {
    const [left, top] = [x * this.wide, depth * ROW];
    const [w, h] = [Math.max(width * this.wide - 1, 0.6), ROW - 1];
    if (at < 0) {
      context.fillStyle = colour("free");
      context.fillRect(left, top, w, h);
      if (w > 40) this.label(context, "smaller parts", left, top, w, h, colour("muted"));
      return;
    }
    const part = this.parts[at];
    const fill = part.parent < 0 ? rgb(colour("free")) : this.ageColour(part.idle);
    context.fillStyle = `rgb(${fill.join(" ")})`;
    context.fillRect(left, top, w, h);
    if (part.state > 1) {
      context.fillStyle = colour(STATES[part.state]); // cached or pinned: a line beneath
      context.fillRect(left, top + h - 3, w, 3);
    }
    if (at === this.cursor) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, Math.max(w - 2, 1), h - 2);
    }
    const bright = fill[0] * 0.299 + fill[1] * 0.587 + fill[2] * 0.114;
    this.label(context, this.labelOf(part, w), left, top, w, h, bright > 140 ? "#10161d" : "#ffffff");
  }

  labelOf(part, width) {
    const pages = `${count(part.total)} pages`;
    if (part.parent < 0) return width > 200 ? `${part.name} · ${pages} · ${plural(part.sequences, "sequence")}` : part.name;
    const shared = part.sequences ? `×${count(part.sequences)}` : STATES[part.state];
    return width > 110 ? `${shared} · ${pages}` : shared;
  }

  label(context, text, left, top, width, height, fill) {
    if (width < 16 || context.measureText(text).width > width - 6) return;
    context.fillStyle = fill;
    context.fillText(text, left + 4, top + height / 2 + 0.5);
  }

  /** Pages from 0 on, below the boxes. */
  drawAxis(context, width, height) {
    const most = this.total;
    const step = 10 ** Math.floor(Math.log10(most / 4 || 1));
    const each = [1, 2, 5, 10].map((one) => one * step).find((one) => most / one <= 8) ?? most;
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    for (let pages = 0; pages <= most; pages += Math.max(1, each)) {
      const x = pages * this.wide;
      context.beginPath();
      context.moveTo(x + 0.5, height - AXIS + 1);
      context.lineTo(x + 0.5, height - AXIS + 5);
      context.stroke();
      const text = pages ? exact(pages) : "0 pages";
      const wide = context.measureText(text).width;
      context.fillText(text, Math.min(Math.max(x - wide / 2, 0), width - wide), height - 6);
    }
  }

  ageColour(seconds) {
    const stops = (this.ages ??= AGES.map((_, at) => rgb(colour(`age-${at}`))));
    if (seconds <= AGES[0]) return stops[0];
    const upper = AGES.findIndex((one) => seconds < one);
    if (upper < 0) return stops[AGES.length - 1];
    const [low, high] = [Math.log(AGES[upper - 1]), Math.log(AGES[upper])];
    return mix(stops[upper - 1], stops[upper], (Math.log(seconds) - low) / (high - low));
  }

  drawScale() {
    const { context, width, height } = begin(this.scale);
    for (let x = 0; x < width; x++) {
      const seconds = AGES[0] * (AGES[AGES.length - 1] / AGES[0]) ** (x / width);
      context.fillStyle = `rgb(${this.ageColour(seconds).join(" ")})`;
      context.fillRect(x, 0, 1, height);
    }
    this.scale.title = AGE_WORDS.join(", ");
  }

  partAt(event) {
    const depth = Math.floor(event.offsetY / ROW);
    const x = event.offsetX / this.wide;
    const box = this.boxes.find((one) => one.depth === depth && one.x <= x && x < one.x + one.width);
    return box ? box.at : -1;
  }

  press(event) {
    if (!this.parts.length) return;
    const part = this.parts[this.cursor];
    const beside = (by) => {
      const kin = this.boxes.filter((one) => one.at >= 0 && one.depth === this.depthOf(this.cursor)).map((one) => one.at);
      return kin[Math.min(Math.max(kin.indexOf(this.cursor) + by, 0), kin.length - 1)];
    };
    const moves = {
      ArrowLeft: () => beside(-1),
      ArrowRight: () => beside(1),
      ArrowUp: () => (part.parent >= 0 ? part.parent : this.cursor),
      ArrowDown: () => part.children[0] ?? this.cursor,
      Home: () => 0,
      End: () => this.parts.length - 1,
      Escape: () => -1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.point(part || event.key === "End" || event.key === "Escape" ? moves[event.key]() : 0);
  }

  depthOf(at) {
    let depth = 0;
    for (let part = this.parts[at]; part && part.parent >= 0; part = this.parts[part.parent]) depth += 1;
    return depth;
  }

  point(at) {
    this.cursor = at;
    this.tell();
    due(this);
  }

  /** In words: the part under the cursor, or what the tree is. */
  tell() {
    const part = this.parts[this.cursor];
    if (!part) {
      this.read.textContent = this.nodes === undefined ? "" : plural(this.nodes, "node");
      return;
    }
    const what = part.parent < 0 ? `namespace ${part.name}` : part.children.length || part.sequences !== 1 ? "prefix" : "one sequence";
    const own = part.total === part.pages ? plural(part.total, "page") : `${plural(part.pages, "page")} of its own, ${exact(part.total)} with what is below`;
    const state = part.state > 1 ? `, ${STATES[part.state]}` : "";
    this.read.textContent = `${what}: ${own}, shared by ${plural(part.sequences, "sequence")}, used ${age(part.idle)}${state}`;
  }
}
