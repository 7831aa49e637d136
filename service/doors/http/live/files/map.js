// The page map: a square for each page, in the order of page numbers, by state.

import { begin, colour, due, emptyNote, mix, rgb, setHeight, swatch } from "./canvas.js";
import { exact, share } from "./format.js";

export const STATES = ["free", "referenced", "pinned", "cached"];
const LEFT = 58; // for the page numbers
const HEIGHT = 320; // at most, unless the pages do not fit otherwise
const MOST_SIDE = 24;
const LEVELS = 16; // of the flash of a page that has changed
const FLASH_MS = 700;

export class PageMap {
  constructor(canvas, legend, read) {
    this.canvas = canvas;
    this.read = read;
    this.states = new Uint8Array(0);
    this.flash = new Uint8Array(0); // levels left, per page
    this.step = 1;
    this.cursor = -1;
    this.isFlashing = false;
    this.flashed = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.small = document.createElement("canvas"); // a pixel for each page
    this.counts = STATES.map(() => document.createElement("b"));
    for (const [at, name] of STATES.entries()) {
      const entry = swatch(name, `${name} `);
      entry.append(this.counts[at]);
      legend.append(entry);
    }
    canvas.addEventListener("pointermove", (event) => this.point(this.pageAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("blur", () => this.point(-1));
  }

  /** Take in the states of `count` pages, four in a byte. */
  set({ step, count, states }) {
    const packed = atob(states);
    const old = this.states;
    const now = new Uint8Array(count);
    for (let page = 0; page < count; page++) {
      now[page] = (packed.charCodeAt(page >> 2) >> ((page & 3) << 1)) & 3;
    }
    if (old.length !== count) {
      this.flash = new Uint8Array(count);
    } else if (!this.still.matches) {
      for (let page = 0; page < count; page++) if (now[page] !== old[page]) this.flash[page] = LEVELS;
      this.isFlashing = true;
      this.flashed = performance.now();
    }
    this.states = now;
    this.step = step;
    due(this);
  }

  setCounts(pool) {
    for (const [at, name] of STATES.entries()) {
      this.counts[at].textContent = `${exact(pool[name])} · ${share(pool[name], pool.total)}`;
    }
  }

  themeChanged() {
    this.palette = null;
    due(this);
  }

  /** Where the squares lie: their side, and how many in a row. In device pixels. */
  layout() {
    const ratio = devicePixelRatio || 1;
    const [w, h] = [Math.floor((this.canvas.clientWidth - LEFT) * ratio), Math.floor(HEIGHT * ratio)];
    const number = this.states.length;
    const fits = (side) => Math.floor(w / side) * Math.floor(h / side) >= number;
    let side = Math.min(Math.floor(Math.sqrt((w * h) / number)), Math.round(MOST_SIDE * ratio));
    while (side > 1 && !fits(side)) side -= 1;
    side = Math.max(side, 1);
    const columns = Math.max(1, Math.floor(w / side));
    return { side, columns, rows: Math.ceil(number / columns), ratio };
  }

  draw() {
    if (!this.states.length) {
      const { context, width, height } = begin(this.canvas);
      emptyNote(context, "waiting for the first snapshot", 0, 0, width, height);
      return;
    }
    const grid = (this.grid = this.layout());
    setHeight(this.canvas, Math.max((grid.rows * grid.side) / grid.ratio, 24));
    const { context, height, ratio } = begin(this.canvas);
    this.paint(grid);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.imageSmoothingEnabled = false;
    const left = Math.round(LEFT * ratio);
    const [w, h] = [grid.columns * grid.side, grid.rows * grid.side];
    context.drawImage(this.small, left, 0, w, h);
    if (grid.side >= 4) {
      context.fillStyle = colour("panel");
      for (let x = 0; x <= grid.columns; x++) context.fillRect(left + x * grid.side - 1, 0, 1, h);
      for (let y = 0; y <= grid.rows; y++) context.fillRect(left, y * grid.side - 1, w, 1);
    }
    this.drawCursor(context, grid, left);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawNumbers(context, grid, height);
    if (this.isFlashing) due(this);
  }

  /** A pixel for each page. */
  paint({ columns, rows }) {
    const { small, states, flash } = this;
    if (small.width !== columns || small.height !== rows || !this.pixels) {
      small.width = columns;
      small.height = rows;
      this.image = small.getContext("2d").createImageData(columns, rows);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const palette = (this.palette ??= makePalette());
    const fade = this.fade();
    const pixels = this.pixels.fill(0);
    let left = 0;
    for (let page = 0; page < states.length; page++) {
      const level = flash[page];
      pixels[page] = palette[states[page] * (LEVELS + 1) + level];
      if (level) left |= flash[page] = Math.max(0, level - fade);
    }
    this.isFlashing = left > 0;
    small.getContext("2d").putImageData(this.image, 0, 0);
  }

  /** Levels that flashing pages have lost since the last frame. */
  fade() {
    if (!this.isFlashing) return LEVELS;
    const now = performance.now();
    const levels = Math.floor(((now - this.flashed) / FLASH_MS) * LEVELS);
    if (levels > 0) this.flashed = now;
    return levels;
  }

  drawCursor(context, { side, columns, ratio }, left) {
    if (this.cursor < 0 || this.cursor >= this.states.length) return;
    const [x, y] = [this.cursor % columns, Math.floor(this.cursor / columns)];
    context.lineWidth = Math.max(2, ratio * 2);
    context.strokeStyle = colour("text");
    const out = side < 8 ? 3 * ratio : 0;
    const size = side - 1 + 2 * out;
    context.strokeRect(left + x * side - out, y * side - out, size, size);
  }

  drawNumbers(context, { side, columns, rows, ratio }, height) {
    const row = side / ratio;
    const each = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((one) => one * row >= 22) ?? 1000;
    context.fillStyle = colour("muted");
    context.textAlign = "right";
    for (let at = 0; at < rows; at += each) {
      const y = Math.min(Math.max(at * row + row / 2, 6), height - 6);
      context.fillText(exact(at * columns * this.step), LEFT - 8, y);
    }
    context.textAlign = "left";
  }

  pageAt(event) {
    if (!this.grid) return -1;
    const { side, columns, ratio } = this.grid;
    const x = Math.floor(((event.offsetX - LEFT) * ratio) / side);
    const y = Math.floor((event.offsetY * ratio) / side);
    const page = y * columns + x;
    return x >= 0 && x < columns && page < this.states.length ? page : -1;
  }

  press(event) {
    if (!this.grid) return;
    const { columns } = this.grid;
    const last = this.states.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    let page = Math.max(this.cursor, 0);
    if (event.key in moves && this.cursor >= 0) page += moves[event.key];
    else if (event.key === "Home") page = 0;
    else if (event.key === "End") page = last;
    else if (event.key === "Escape") page = -1;
    else if (!(event.key in moves)) return;
    event.preventDefault();
    this.point(Math.min(page, last), page >= 0 || event.key === "Escape");
  }

  point(page, isMeant = true) {
    if (isMeant) this.cursor = page;
    this.tell();
    due(this);
  }

  /** In words: the page under the cursor, or what a square is. */
  tell() {
    const { cursor, states, step, grid } = this;
    if (cursor >= 0 && cursor < states.length) {
      this.read.textContent = `page ${exact(cursor * step)}: ${STATES[states[cursor]]}`;
    } else if (grid) {
      const what = step === 1 ? "one page" : `one page of every ${step}`;
      this.read.textContent = `a square is ${what}, ${exact(grid.columns)} in a row`;
    }
  }
}

/** A pixel by state and level of flash. */
function makePalette() {
  const flash = rgb(colour("flash"));
  const pixels = new Uint32Array(STATES.length * (LEVELS + 1));
  const bytes = new Uint8Array(pixels.buffer);
  for (const [state, name] of STATES.entries()) {
    for (let level = 0; level <= LEVELS; level++) {
      const found = mix(rgb(colour(name)), flash, (0.65 * level) / LEVELS);
      bytes.set([...found, 255], 4 * (state * (LEVELS + 1) + level));
    }
  }
  return pixels;
}
