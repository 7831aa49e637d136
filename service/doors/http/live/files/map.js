// The page map: a square for each page, in the order of page numbers, coloured by state. In a cluster each
// engine's pages are a strip of their own.

import { Drawing, begin, colour, due, emptyNote, rgb, setHeight, swatch } from "./canvas.js";
import { exact, share } from "./format.js";

export const STATES = ["free", "referenced", "pinned", "cached"];
const LEFT = 58; // for the page numbers
const HEIGHT = 320; // the most that squares take, unless one device pixel a page needs more
const HEADING = 20; // above each engine's strip
const MAX_SIDE = 24;
const MIN_RING_SIDE = 5; // a smaller square has no room for a ring
const RING_MS = 700;

export class PageMap extends Drawing {
  constructor(canvas, legend, output) {
    super(canvas, output);
    this.states = new Uint8Array(0);
    this.changed = new Float64Array(0); // when each page changed last
    this.step = 1;
    this.engines = [];
    this.prefersStill = matchMedia("(prefers-reduced-motion: reduce)");
    this.small = document.createElement("canvas"); // one pixel a page
    this.counts = STATES.map(() => document.createElement("b"));
    for (const [at, name] of STATES.entries()) {
      const entry = swatch(name, `${name} `);
      entry.append(this.counts[at]);
      legend.append(entry);
    }
    const ring = swatch("panel", "changed just now");
    ring.firstChild.classList.add("ring");
    legend.append(ring);
  }

  /** Take the states of `count` pages, four to a byte. */
  set({ step, count, states }) {
    const packed = atob(states);
    const old = this.states;
    const now = new Uint8Array(count);
    for (let page = 0; page < count; page++) {
      now[page] = (packed.charCodeAt(page >> 2) >> ((page & 3) << 1)) & 3;
    }
    if (old.length !== count) {
      this.changed = new Float64Array(count).fill(-RING_MS);
    } else if (!this.prefersStill.matches) {
      const moment = performance.now();
      for (let page = 0; page < count; page++) if (now[page] !== old[page]) this.changed[page] = moment;
      setTimeout(() => due(this), RING_MS + 20); // without the rings
    }
    this.states = now;
    this.step = step;
    due(this);
  }

  setPool(pool) {
    for (const [at, name] of STATES.entries()) {
      this.counts[at].textContent = `${exact(pool[name])} · ${share(pool[name], pool.total)}`;
    }
    this.engines = pool.engines.length > 1 ? pool.engines : [];
    due(this);
  }

  themeChanged() {
    this.palette = null;
    due(this);
  }

  /** One strip for each engine, or one for all pages: its title, first state, number of states, total pages. */
  strips() {
    let first = 0;
    const strips = this.engines.map((engine) => {
      const count = Math.ceil(engine.total / this.step);
      const held = share(engine.referenced + engine.pinned, engine.total);
      const title = `${engine.name} · ${held} held · ${share(engine.cached, engine.total)} cached`;
      first += count;
      return { name: engine.name, title, first: first - count, count };
    });
    const isWhole = strips.length && first === this.states.length;
    return isWhole ? strips : [{ name: "", title: "", first: 0, count: this.states.length }];
  }

  /** The side of a square, squares in a row, and the place of each strip; in device pixels. */
  layout() {
    const ratio = devicePixelRatio || 1;
    const strips = this.strips();
    const heading = strips[0].title ? Math.round(HEADING * ratio) : 0;
    const width = Math.max(1, Math.floor((this.canvas.clientWidth - LEFT) * ratio));
    const height = Math.floor(HEIGHT * ratio) - heading * strips.length;
    const rowsOf = (side) => {
      const columns = Math.max(1, Math.floor(width / side));
      return strips.reduce((sum, strip) => sum + Math.ceil(strip.count / columns), 0);
    };
    let side = Math.min(Math.floor(Math.sqrt((width * height) / this.states.length)), Math.round(MAX_SIDE * ratio));
    side = Math.max(side, 1);
    while (side > 1 && rowsOf(side) * side > height) side -= 1;
    const columns = Math.max(1, Math.floor(width / side));
    let [row, top] = [0, 0];
    for (const strip of strips) {
      strip.row = row;
      strip.rows = Math.ceil(strip.count / columns);
      strip.top = top + heading;
      row += strip.rows;
      top = strip.top + strip.rows * side;
    }
    return { side, columns, strips, rows: row, height: top, heading, ratio };
  }

  draw() {
    if (!this.states.length) {
      const { context, width, height } = begin(this.canvas);
      emptyNote(context, "waiting for the first snapshot", 0, 0, width, height);
      return;
    }
    const grid = (this.grid = this.layout());
    const { side, columns, ratio } = grid;
    setHeight(this.canvas, Math.max(grid.height / ratio, 24));
    const { context } = begin(this.canvas);
    this.paint(grid);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.imageSmoothingEnabled = false;
    const left = Math.round(LEFT * ratio);
    for (const { row, rows, top } of grid.strips) {
      const [w, h] = [columns * side, rows * side];
      context.drawImage(this.small, 0, row, columns, rows, left, top, w, h);
      if (side < 4) continue;
      context.fillStyle = colour("panel");
      for (let x = 0; x <= columns; x++) context.fillRect(left + x * side - 1, top, 1, h);
      for (let y = 0; y <= rows; y++) context.fillRect(left, top + y * side - 1, w, 1);
    }
    this.drawRings(context, grid, left);
    this.drawCursor(context, grid, left);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawText(context, grid);
    this.refresh();
  }

  /** One pixel a page. */
  paint({ columns, rows, strips }) {
    const { small, states } = this;
    if (small.width !== columns || small.height !== rows || !this.pixels) {
      small.width = columns;
      small.height = rows;
      this.image = small.getContext("2d").createImageData(columns, rows);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const palette = (this.palette ??= makePalette());
    const pixels = this.pixels.fill(0);
    for (const { first, count, row } of strips) {
      for (let at = 0; at < count; at++) pixels[row * columns + at] = palette[states[first + at]];
    }
    small.getContext("2d").putImageData(this.image, 0, 0);
  }

  /** A ring inside each square whose page has just changed. */
  drawRings(context, { side, columns, strips, ratio }, left) {
    if (side < MIN_RING_SIDE * ratio) return;
    const width = Math.max(1, Math.floor(side / 8));
    const since = performance.now() - RING_MS;
    context.strokeStyle = colour("ring");
    context.lineWidth = width;
    for (const { first, count, top } of strips) {
      for (let at = 0; at < count; at++) {
        if (this.changed[first + at] < since) continue;
        const [x, y] = [left + (at % columns) * side, top + Math.floor(at / columns) * side];
        context.strokeRect(x + width / 2, y + width / 2, side - 1 - width, side - 1 - width);
      }
    }
  }

  drawCursor(context, { side, ratio }, left) {
    const place = this.placeOf(this.cursor);
    if (!place) return;
    context.lineWidth = Math.max(2, ratio * 2);
    context.strokeStyle = colour("text");
    const out = side < 8 ? 3 * ratio : 0;
    const size = side - 1 + 2 * out;
    context.strokeRect(left + place.column * side - out, place.strip.top + place.row * side - out, size, size);
  }

  /** Page numbers beside the rows, counted from 0 in each strip, and the strips' titles. */
  drawText(context, { side, columns, strips, heading, ratio }) {
    const row = side / ratio;
    const each = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((one) => one * row >= 22) ?? 1000;
    context.fillStyle = colour("muted");
    for (const strip of strips) {
      const top = strip.top / ratio;
      if (heading) context.fillText(strip.title, LEFT, top - HEADING / 2);
      context.textAlign = "right";
      for (let at = 0; at < strip.rows; at += each) {
        const y = top + Math.min(Math.max(at * row + row / 2, 6), Math.max(strip.rows * row - 6, 6));
        context.fillText(exact(at * columns * this.step), LEFT - 8, y);
      }
      context.textAlign = "left";
    }
  }

  /** Strip, column and row of a state; undefined where there is none. */
  placeOf(index) {
    if (!this.grid || index < 0) return undefined;
    const strip = this.grid.strips.find(({ first, count }) => first <= index && index < first + count);
    if (!strip) return undefined;
    const at = index - strip.first;
    return { strip, column: at % this.grid.columns, row: Math.floor(at / this.grid.columns) };
  }

  anchor() {
    const { strip, column, row } = this.placeOf(this.cursor) ?? { strip: { top: 0 }, column: 0, row: 0 };
    const { side, ratio } = this.grid;
    return [LEFT + ((column + 1) * side) / ratio, (strip.top + (row + 1) * side) / ratio];
  }

  indexAt(event) {
    if (!this.grid) return -1;
    const { side, columns, strips, ratio } = this.grid;
    const x = Math.floor(((event.offsetX - LEFT) * ratio) / side);
    if (x < 0 || x >= columns) return -1;
    for (const { first, count, top } of strips) {
      const at = Math.floor((event.offsetY * ratio - top) / side) * columns + x;
      if (event.offsetY * ratio >= top && at < count) return first + at;
    }
    return -1;
  }

  press(event) {
    if (!this.grid) return;
    const { columns } = this.grid;
    const last = this.states.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    let page = Math.max(this.cursor, 0);
    if (event.key in moves) page = this.cursor < 0 ? 0 : page + moves[event.key];
    else if (event.key === "Home") page = 0;
    else if (event.key === "End") page = last;
    else if (event.key === "Escape") page = -1;
    else return;
    event.preventDefault();
    if (event.key === "Escape" || (page >= 0 && page <= last)) this.point(page);
  }

  describe() {
    const { cursor, states, step } = this;
    const place = this.placeOf(cursor);
    if (place) {
      const engine = place.strip.name && `${place.strip.name}, `;
      return `${engine}page ${exact((cursor - place.strip.first) * step)}: ${STATES[states[cursor]]}`;
    }
    const what = step === 1 ? "1 page" : `1 of ${step} pages`;
    return this.grid ? `1 square = ${what} · ${exact(this.grid.columns)} squares a row` : "";
  }
}

/** A pixel for each state. */
function makePalette() {
  const pixels = new Uint32Array(STATES.length);
  const bytes = new Uint8Array(pixels.buffer);
  for (const [state, name] of STATES.entries()) bytes.set([...rgb(colour(name)), 255], 4 * state);
  return pixels;
}
