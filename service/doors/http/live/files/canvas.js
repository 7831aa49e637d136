// Shared by all drawings: canvas size in device pixels, theme colours, ticks, frames, cursor and tooltip.

export const FONT = '11px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif';

/** Milliseconds that the last frames took to draw, the newest last. */
export const frames = [];

const drawings = new Set();
let isScheduled = false;

/** Schedule a redraw for the next frame. */
export function due(drawing) {
  drawings.add(drawing);
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    const begun = performance.now();
    const now = [...drawings];
    drawings.clear();
    for (const one of now) one.draw();
    frames.push(performance.now() - begun);
    if (frames.length > 240) frames.shift();
  });
}

/** The context of a canvas, cleared, in CSS pixels; `width` and `height` are its size. */
export function begin(canvas) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  return { context, width, height, ratio };
}

/** The canvas's height on the page, in CSS pixels. */
export function setHeight(canvas, height) {
  const text = `${Math.ceil(height)}px`;
  if (canvas.style.height !== text) canvas.style.height = text;
}

let known = new Map();

/** A colour of the theme, by its variable's name. */
export function colour(name) {
  let found = known.get(name);
  if (found === undefined) {
    found = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, found);
  }
  return found;
}

export function themeChanged() {
  known = new Map();
}

/** Red, green and blue of "#rrggbb". */
export function rgb(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

export function mix(from, to, share) {
  return from.map((value, at) => Math.round(value + (to[at] - value) * share));
}

/** Round numbers from 0 to beyond `most`, in about `number` steps of 1, 2 or 5. */
export function ticks(most, number = 4) {
  const rough = most / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, at) => at * step);
}

/** The same for bytes, in steps of powers of two. */
export function byteTicks(most, number = 4) {
  const step = 2 ** Math.ceil(Math.log2(most / number));
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, at) => at * step);
}

/** Text in the middle of an empty drawing. */
export function emptyNote(context, text, left, top, width, height) {
  const wide = context.measureText(text).width + 16;
  context.fillStyle = colour("panel");
  context.fillRect(left + (width - wide) / 2, top + height / 2 - 8, wide, 16);
  context.fillStyle = colour("muted");
  context.textAlign = "center";
  context.fillText(text, left + width / 2, top + height / 2);
  context.textAlign = "left";
}

/** A legend entry: a swatch in a theme colour, and text. */
export function swatch(name, text) {
  const entry = document.createElement("span");
  const square = document.createElement("span");
  square.className = "swatch";
  square.style.background = `var(--${name})`;
  entry.append(square, text);
  return entry;
}

/** A canvas with a cursor that pointer and keyboard move, and a description of the thing under it.
 *
 * Subclasses have `draw()`, `indexAt(event)`, `press(event)`, `describe()` (the text for the cursor, or for the
 * drawing as a whole at -1) and `anchor()` (the cursor's place on the canvas, in CSS pixels). */
export class Drawing {
  constructor(canvas, output) {
    this.canvas = canvas;
    this.output = output;
    this.cursor = -1;
    this.pointer = null; // the pointer's place on the canvas; null where the keyboard moves the cursor
    for (const name of ["pointerdown", "pointermove"]) {
      canvas.addEventListener(name, (event) => this.point(this.indexAt(event), [event.offsetX, event.offsetY]));
    }
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  point(index, pointer = null) {
    this.cursor = index;
    this.pointer = pointer;
    this.refresh();
    due(this);
  }

  /** Update the description, and the tooltip if this drawing has the cursor. */
  refresh() {
    const text = this.describe();
    if (this.output.textContent !== text) this.output.textContent = text;
    if (this.cursor >= 0) showTooltip(this.canvas, text, this.pointer ?? this.anchor());
    else if (tooltip.owner === this.canvas) hideTooltip();
  }

  themeChanged() {
    due(this);
  }
}

const TOOLTIP_GAP = 14;
const tooltip = { element: document.getElementById("tooltip"), owner: null };

/** Show `text` beside a place on a canvas, inside the window. */
function showTooltip(canvas, text, [x, y]) {
  const { element } = tooltip;
  tooltip.owner = canvas;
  element.textContent = text;
  element.hidden = false;
  const box = canvas.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = element;
  const right = box.left + x + TOOLTIP_GAP;
  const below = box.top + y + TOOLTIP_GAP;
  const left = right + width > innerWidth - 4 ? box.left + x - width - TOOLTIP_GAP : right;
  const top = below + height > innerHeight - 4 ? box.top + y - height - TOOLTIP_GAP : below;
  element.style.left = `${Math.min(Math.max(left, 4), Math.max(innerWidth - width - 4, 4))}px`;
  element.style.top = `${Math.max(top, 4)}px`;
}

function hideTooltip() {
  tooltip.owner = null;
  tooltip.element.hidden = true;
}
