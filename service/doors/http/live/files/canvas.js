// What all drawings share: size in device pixels, colours of the theme, ticks, the next frame.

export const FONT = '11px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif';

/** Milliseconds that the last frames took to draw, the newest last. */
export const frames = [];

const drawings = new Set();
let isAsked = false;

/** Draw it in the next frame, with all others that are due. */
export function due(drawing) {
  drawings.add(drawing);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
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

/** Round numbers from 0 to beyond `most`, in steps of 1, 2 or 5; at most so many. */
export function ticks(most, number = 4) {
  const rough = most / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, at) => at * step);
}

/** The same for bytes: in steps of powers of two. */
export function byteTicks(most, number = 4) {
  const step = 2 ** Math.ceil(Math.log2(most / number));
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, at) => at * step);
}

/** Words in the middle of an empty drawing. */
export function emptyNote(context, text, left, top, width, height) {
  const wide = context.measureText(text).width + 16;
  context.fillStyle = colour("panel");
  context.fillRect(left + (width - wide) / 2, top + height / 2 - 8, wide, 16);
  context.fillStyle = colour("muted");
  context.textAlign = "center";
  context.fillText(text, left + width / 2, top + height / 2);
  context.textAlign = "left";
}

/** A legend's entry: a swatch and words. Its colour follows the theme. */
export function swatch(name, text) {
  const entry = document.createElement("span");
  const square = document.createElement("span");
  square.className = "swatch";
  square.style.background = `var(--${name})`;
  entry.append(square, text);
  return entry;
}
