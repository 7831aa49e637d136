// The prefix tree as an icicle: a part is as wide as the pages at and below it, so pages not covered by
// children are its own. Its colour says how many sequences share it.

import { Drawing, begin, colour, due, emptyNote, mix, rgb, setHeight, swatch } from "./canvas.js";
import { age, count, exact, plural } from "./format.js";
import { STATES } from "./map.js";

const AXIS = 18;
const ROW = 22;
const TOOLTIP_RISE = 6; // so that the tooltip touches its box
const CACHED = 3;
const PINNED = 2;
const SHARED = [1, 2, 4, 16, 64]; // sequences, one for each colour

export class Icicle extends Drawing {
  /** Draws `levels` levels: the canvas keeps this height whatever the tree is. */
  constructor(canvas, legend, output, levels = 7) {
    super(canvas, output);
    this.levels = levels;
    this.parts = [];
    this.boxes = [];
    this.total = 0;
    this.scale = document.createElement("canvas");
    const words = document.createElement("span");
    words.append("shared by 1 ", this.scale, ` ${SHARED[SHARED.length - 1]} or more sequences`);
    legend.append(words, swatch("cached", "cached, no sequence"), swatch("pinned", "pinned"));
    setHeight(canvas, levels * ROW + AXIS);
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
    this.layout();
    this.refresh();
    due(this);
  }

  setPool(pool) {
    this.used = pool.total - pool.free;
    this.nodes = pool.nodes;
  }

  themeChanged() {
    this.ramp = null;
    due(this);
  }

  /** Boxes from left to right, row by row; `x` and `width` in pages. */
  layout() {
    const roots = this.parts.flatMap((part, at) => (part.parent < 0 ? [at] : []));
    this.total = roots.reduce((sum, at) => sum + this.parts[at].total, 0);
    this.boxes = [];
    let row = roots;
    const begins = new Map();
    let x = 0;
    for (const at of roots) {
      begins.set(at, x);
      x += this.parts[at].total;
    }
    for (let depth = 0; row.length && depth < this.levels; depth++) {
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
        if (folded > 0 && depth + 1 < this.levels) this.boxes.push({ at: -1, depth: depth + 1, x: from, width: folded });
      }
      row = next;
    }
    this.hasDeeper = row.length > 0;
  }

  draw() {
    this.drawScale();
    const { context, width, height } = begin(this.canvas);
    if (!this.total) {
      emptyNote(context, "no pages in use", 0, 0, width, height);
      return;
    }
    this.pixelsPerPage = width / this.total;
    for (const box of this.boxes) this.drawBox(context, box);
    this.drawAxis(context, width, height);
  }

  drawBox(context, { at, depth, x, width }) {
    const [left, top] = [x * this.pixelsPerPage, depth * ROW];
    const [w, h] = [Math.max(width * this.pixelsPerPage - 1, 0.6), ROW - 1];
    if (at < 0) {
      context.fillStyle = colour("free");
      context.fillRect(left, top, w, h);
      if (w > 40) this.label(context, "smaller parts", left, top, w, h, colour("muted"));
      return;
    }
    const part = this.parts[at];
    const fill = this.fillOf(part);
    context.fillStyle = `rgb(${fill.join(" ")})`;
    context.fillRect(left, top, w, h);
    if (at === this.cursor) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, Math.max(w - 2, 1), h - 2);
    }
    const brightness = fill[0] * 0.299 + fill[1] * 0.587 + fill[2] * 0.114;
    this.label(context, this.labelOf(part, w), left, top, w, h, brightness > 140 ? "#10161d" : "#ffffff");
  }

  fillOf(part) {
    if (part.parent < 0) return rgb(colour("free"));
    if (part.state === PINNED) return rgb(colour("pinned"));
    if (part.state === CACHED) return rgb(colour("cached"));
    return this.shareColour(part.sequences);
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
    const labels = Math.max(2, Math.floor(width / 130));
    const step = 10 ** Math.floor(Math.log10(most / labels || 1));
    const each = [1, 2, 5, 10].map((one) => one * step).find((one) => most / one <= labels) ?? most;
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    for (let pages = 0; pages <= most; pages += Math.max(1, each)) {
      const x = pages * this.pixelsPerPage;
      context.beginPath();
      context.moveTo(x + 0.5, height - AXIS + 1);
      context.lineTo(x + 0.5, height - AXIS + 5);
      context.stroke();
      const text = pages ? exact(pages) : "0 pages";
      const wide = context.measureText(text).width;
      context.fillText(text, Math.min(Math.max(x - wide / 2, 0), width - wide), height - 6);
    }
  }

  shareColour(sequences) {
    const stops = (this.ramp ??= SHARED.map((_, at) => rgb(colour(`shared-${at}`))));
    const upper = SHARED.findIndex((one) => sequences < one);
    if (upper < 0) return stops[SHARED.length - 1];
    if (upper === 0) return stops[0];
    const [low, high] = [Math.log(SHARED[upper - 1]), Math.log(SHARED[upper])];
    return mix(stops[upper - 1], stops[upper], (Math.log(sequences) - low) / (high - low));
  }

  drawScale() {
    const { context, width, height } = begin(this.scale);
    for (let x = 0; x < width; x++) {
      const sequences = SHARED[SHARED.length - 1] ** (x / width);
      context.fillStyle = `rgb(${this.shareColour(sequences).join(" ")})`;
      context.fillRect(x, 0, 1, height);
    }
  }

  indexAt(event) {
    const depth = Math.floor(event.offsetY / ROW);
    const x = event.offsetX / this.pixelsPerPage;
    const box = this.boxes.find((one) => one.depth === depth && one.x <= x && x < one.x + one.width);
    return box ? box.at : -1;
  }

  anchor() {
    const box = this.boxes.find((one) => one.at === this.cursor);
    return box ? [box.x * this.pixelsPerPage, (box.depth + 1) * ROW - TOOLTIP_RISE] : [0, 0];
  }

  press(event) {
    if (!this.boxes.length) return;
    const part = this.parts[this.cursor];
    const drawn = this.boxes.filter((one) => one.at >= 0);
    const beside = (by) => {
      const depth = drawn.find((one) => one.at === this.cursor)?.depth;
      const row = drawn.filter((one) => one.depth === depth).map((one) => one.at);
      return row[Math.min(Math.max(row.indexOf(this.cursor) + by, 0), row.length - 1)];
    };
    const below = () => part.children.find((at) => drawn.some((one) => one.at === at)) ?? this.cursor;
    const moves = {
      ArrowLeft: () => beside(-1),
      ArrowRight: () => beside(1),
      ArrowUp: () => (part.parent >= 0 ? part.parent : this.cursor),
      ArrowDown: below,
      Home: () => drawn[0].at,
      End: () => drawn[drawn.length - 1].at,
      Escape: () => -1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.point(part || event.key === "End" || event.key === "Escape" ? moves[event.key]() : drawn[0].at);
  }

  describe() {
    const part = this.parts[this.cursor];
    if (!part) {
      if (this.nodes === undefined) return "";
      const isPartial = this.used - this.total > 0.005 * this.used;
      const shown = isPartial ? ` · ${exact(this.total)} of ${exact(this.used)} pages shown` : "";
      return `${plural(this.nodes, "node")}${shown}${this.hasDeeper ? ` · first ${this.levels} levels` : ""}`;
    }
    const what = part.parent < 0 ? `namespace ${part.name}` : part.children.length || part.sequences !== 1 ? "prefix" : "one sequence";
    const own = part.total === part.pages ? plural(part.total, "page") : `${plural(part.pages, "own page")}, ${exact(part.total)} with children`;
    const state = part.state > 1 ? `, ${STATES[part.state]}` : "";
    return `${what}: ${own}, shared by ${plural(part.sequences, "sequence")}, used ${age(part.idle)}${state}`;
  }
}
