// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A number with as many digits as it deserves. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
  if (Number.isInteger(value) || size >= 1000) return whole.format(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

/** A loss: three digits behind the point. */
export function loss(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

/** A size, with powers of 1024. */
export function bytes(value) {
  if (!value) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(power === 0 || scaled >= 100 ? 0 : 1)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A duration, in its two largest units. */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A time of day; with the date, unless it is today's. */
export function moment(at) {
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString("en-GB");
  const isToday = when.toDateString() === new Date().toDateString();
  return isToday ? time : `${when.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

/** Any figure's value, by its unit. */
export function figure(value, unit) {
  if (value === null || value === undefined || value === "") return "–";
  if (Array.isArray(value)) return value.length ? value.map((item) => figure(item, unit)).join(", ") : "–";
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, inner]) => `${words(name)} ${figure(inner, "")}`);
    return entries.length ? entries.join(", ") : "–";
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return value;
  if (unit === "seconds since the epoch") return value ? moment(value) : "–";
  if (unit === "seconds") return duration(value);
  if (unit === "bytes") return bytes(value);
  return unit && unit !== "stage" ? `${number(value)} ${unit}` : number(value);
}

/** A figure's name in words. */
export function words(name) {
  return name.replaceAll("_", " ");
}

/** "1 peer", "2 peers". */
export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** The stage and the variant of a block, by its label: a number, or a text such as "1.2". */
export function blockOf(label) {
  const [stage, variant] = String(label).split(".").map(Number);
  return [stage, variant ?? 0];
}

/** The order of two blocks, by their labels. */
export function compareBlocks(a, b) {
  const [[stage, variant], [other, its]] = [blockOf(a), blockOf(b)];
  return stage - other || variant - its;
}
