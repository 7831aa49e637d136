// Stacked areas of the last five minutes' counts, one row a second.

import { Drawing, begin, colour, emptyNote, swatch, ticks } from "./canvas.js";
import { digits } from "./format.js";

const SPAN_S = 300;
const LEFT = 62;
const BOTTOM = 18;
const TOP = 6;

/** Rows of numbers by column, kept for five minutes. */
export class Rows {
  constructor() {
    this.columns = [];
    this.rows = [];
    this.next = 0;
  }

  add({ first, rows }) {
    if (first !== this.next) this.rows = []; // rows are missing, or the service has restarted
    this.rows.push(...rows);
    this.rows.splice(0, this.rows.length - SPAN_S - 1);
    this.next = first + rows.length;
  }

  index(name) {
    return this.columns.indexOf(name);
  }

  get last() {
    return this.rows[this.rows.length - 1];
  }

  /** A column's sum over all rows: the count, for a column of rates a second. */
  sum(name) {
    const at = this.index(name);
    return this.rows.reduce((sum, row) => sum + (row[at] ?? 0), 0);
  }
}

/** One chart. `series` are [column, label]; `value(row, column)` is drawn, `unit(number)` formats it; `steps`
 * makes the ticks of the axis. The cursor counts seconds before the last row. */
export class Chart extends Drawing {
  constructor(canvas, legend, output, rows, { series, value, unit, empty, steps = ticks, least = 1 }) {
    super(canvas, output);
    Object.assign(this, { rows, series, unit, empty, steps, least });
    this.value = value ?? ((row, name) => row[rows.index(name)]);
    if (legend) legend.append(...series.map(([name, words]) => swatch(name, words)));
  }

  draw() {
    const { context, width, height } = begin(this.canvas);
    const box = (this.box = { left: LEFT, top: TOP, width: width - LEFT - 8, height: height - BOTTOM - TOP });
    const rows = this.rows.rows;
    const stacks = rows.map((row) => this.stack(row));
    const most = stacks.reduce((found, stack) => Math.max(found, stack[stack.length - 1]), 0);
    const marks = this.steps(Math.max(most, this.least));
    const top = marks[marks.length - 1];
    this.drawAxes(context, box, marks, top);
    const at = (index) => box.left + box.width * (1 - (this.rows.last?.[0] - rows[index][0]) / SPAN_S);
    if (rows.length > 1) this.drawAreas(context, box, stacks, top, at);
    if (most === 0) emptyNote(context, rows.length ? this.empty : "", box.left, box.top, box.width, box.height);
    if (this.cursor >= 0 && this.cursor < rows.length) {
      const x = Math.round(at(rows.length - 1 - this.cursor)) + 0.5;
      line(context, x, box.top, x, box.top + box.height, colour("text"));
    }
  }

  /** Running sums of the row's series, from 0. */
  stack(row) {
    const found = [0];
    for (const [name] of this.series) found.push(found[found.length - 1] + this.value(row, name));
    return found;
  }

  drawAreas(context, box, stacks, top, at) {
    const y = (value) => box.top + box.height * (1 - value / top);
    context.save();
    context.beginPath();
    context.rect(box.left, 0, box.width, box.top + box.height);
    context.clip();
    this.series.forEach(([name], layer) => {
      context.beginPath();
      stacks.forEach((stack, index) => context.lineTo(at(index), y(stack[layer + 1])));
      for (let index = stacks.length - 1; index >= 0; index--) context.lineTo(at(index), y(stacks[index][layer]));
      context.closePath();
      context.fillStyle = colour(name);
      context.fill();
    });
    context.restore();
  }

  drawAxes(context, box, marks, top) {
    for (const mark of marks) {
      const y = Math.round(box.top + box.height * (1 - mark / top)) + 0.5;
      line(context, box.left, y, box.left + box.width, y, colour("line"));
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      context.fillText(mark ? this.unit(mark) : "0", box.left - 7, y);
    }
    for (let minutes = 0; minutes <= 5; minutes += box.width < 260 ? 2 : 1) {
      const x = box.left + box.width * (1 - minutes / 5);
      line(context, x, box.top + box.height, x, box.top + box.height + 4, colour("line"));
      context.textAlign = minutes ? "center" : "right";
      context.fillText(minutes ? `−${minutes} min` : "now", x, box.top + box.height + 11);
    }
    context.textAlign = "left";
  }

  indexAt(event) {
    if (!this.box) return -1;
    const share = (event.offsetX - this.box.left) / this.box.width;
    const second = Math.round((1 - share) * SPAN_S);
    return second >= 0 && second < this.rows.rows.length ? second : -1;
  }

  press(event) {
    const last = this.rows.rows.length - 1;
    const moves = { ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10 };
    let second = this.cursor;
    if (event.key in moves) second = second < 0 ? 0 : second + moves[event.key];
    else if (event.key === "Home") second = last;
    else if (event.key === "End") second = 0;
    else if (event.key === "Escape") return this.point(-1);
    else return;
    event.preventDefault();
    this.point(Math.min(Math.max(second, 0), last));
  }

  anchor() {
    const { left, top, width } = this.box;
    return [left + width * (1 - this.cursor / SPAN_S), top];
  }

  describe() {
    const rows = this.rows.rows;
    const row = rows[rows.length - 1 - Math.max(this.cursor, 0)];
    if (!row) return "";
    const when = this.cursor > 0 ? `${this.cursor} s ago: ` : "";
    const values = this.series.map(([name, words]) => [this.value(row, name), words]);
    const shown = this.cursor < 0 ? [] : values.filter(([value]) => value > 0);
    const sum = values.reduce((found, [value]) => found + value, 0);
    const parts = shown.length > 1 ? `: ${shown.map(([value, words]) => `${words} ${this.unit(value)}`).join(", ")}` : "";
    return `${when}${this.unit(sum)}${parts}`;
  }
}

export function plain(value) {
  return value >= 10000 ? `${digits(value / 1000)}k` : digits(value);
}

function line(context, x0, y0, x1, y1, stroke) {
  context.strokeStyle = stroke;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
