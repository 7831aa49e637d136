// Numbers as people read them.

const THIN = "\u202f";

/** Four digits at most: 0, 7, 12.5, 1,234, 12.3k, 4.56M. */
export function count(value) {
  if (value >= 1e9) return `${digits(value / 1e9)}G`;
  if (value >= 1e6) return `${digits(value / 1e6)}M`;
  if (value >= 1e4) return `${digits(value / 1e3)}k`;
  return value >= 1000 ? exact(value) : digits(value);
}

/** All digits of a whole number. */
export function exact(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** Three digits that matter. */
export function digits(value) {
  if (value === 0) return "0";
  if (value >= 100) return value.toFixed(0);
  if (value >= 10) return String(+value.toFixed(1));
  return String(+value.toPrecision(3));
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${digits(value)}${THIN}${units[at]}`;
}

/** Milliseconds in the unit that suits them. */
export function duration(ms) {
  if (ms === 0) return "0";
  if (ms < 0.9995) return `${digits(ms * 1000)}${THIN}µs`;
  if (ms < 999.5) return `${digits(ms)}${THIN}ms`;
  return `${digits(ms / 1000)}${THIN}s`;
}

/** How long ago. */
export function age(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.round(seconds)}${THIN}s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)}${THIN}min ago`;
  if (seconds < 86400) return `${digits(seconds / 3600)}${THIN}h ago`;
  return `${digits(seconds / 86400)}${THIN}days ago`;
}

export function share(part, whole) {
  if (!(whole > 0)) return "–";
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 0.05 ? "< 0.1%" : `${+percent.toFixed(1)}%`;
}

export function plural(value, word) {
  return `${exact(value)} ${word}${value === 1 ? "" : "s"}`;
}
