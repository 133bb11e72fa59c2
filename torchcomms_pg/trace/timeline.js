// Draws bars in lanes, with search, zoom and pinning. The page around it has `data` and `page`, and
// calls draw() when it is complete.
//
// data.end is the last end of a bar. A bar is [lane, start, end, ended, ...] and data.lanes has what
// page.lane takes: lanes of one name follow each other. page has:
//   lane(lane)  [name, what more to write, whether it is marked]     tick(at, span)  text on the axis
//   fill(bar)  a color     title(bar)  text in the bar     text(bar)  what the search looks in
//   tip(bar), pinned(bar)  texts about the bar     least  smallest distance of ticks
const LANE = 0, START = 1, END = 2, ENDED = 3;
const get = id => document.getElementById(id);
function table(id, head, rows) {
  const add = (tag, texts) => {
    const row = get(id).insertRow();
    for (const text of texts) row.appendChild(document.createElement(tag)).textContent = text;
  };
  add("th", head);
  for (const row of rows) add("td", row);
}
const box = get("timeline"), canvas = box.querySelector("canvas"), paint = canvas.getContext("2d");
const laneHeight = 24, axis = 24;
const total = Math.max(1e-3, data.end), home = [-total * 0.02, total * 1.1];
let [from, to] = home, left = 0, wanted = "", pinned = null;
const lanes = data.lanes.map(() => []);
for (const bar of data.bars) lanes[bar[LANE]].push(bar);
for (const bars of lanes) bars.sort((a, b) => a[START] - b[START]);
const first = data.lanes.map((lane, index) => index === 0 || data.lanes[index - 1][0] !== lane[0]);
const height = axis + laneHeight * lanes.length + 6;
get("height").style.height = height + "px";
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const width = () => canvas.clientWidth;
const x = time => left + (time - from) / (to - from) * (width() - left);
const time = px => from + (px - left) / (width() - left) * (to - from);
const y = lane => axis + lane * laneHeight - box.scrollTop;
const matches = bar => wanted === "" ? !bar[ENDED] : page.text(bar).toLowerCase().includes(wanted);

function place(tip, event) {
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}
function cut(text, room, part = (text, count) => text.slice(0, count) + "\u2026") {
  if (paint.measureText(text).width <= room) return text;
  let count = text.length;
  while (count > 0 && paint.measureText(part(text, count)).width > room) count--;
  return count > 0 ? part(text, count) : "";
}
const tail = (text, count) => "\u2026" + text.slice(-count);  // names of groups differ at their ends
function drawBar(bar, at, text, background) {
  const a = Math.max(left, x(bar[START])), b = Math.min(width(), x(bar[END]));
  const top = at + 3, tall = laneHeight - 6, wide = Math.max(1.5, b - a - 0.5);
  const fill = page.fill(bar);
  paint.globalAlpha = wanted !== "" && !matches(bar) ? 0.18 : 1;
  paint.fillStyle = fill;
  paint.fillRect(a, top, wide, tall);
  if (!bar[ENDED] && b < width()) {  // the end is open: a toothed edge
    paint.beginPath();
    for (let tooth = 0; tooth < 3; tooth++) {
      const up = top + tooth * tall / 3;
      paint.moveTo(a + wide, up);
      paint.lineTo(a + wide + 7, up + tall / 6);
      paint.lineTo(a + wide, up + tall / 3);
    }
    paint.fill();
  }
  if (bar === pinned) {
    paint.strokeStyle = color("--mark");
    paint.lineWidth = 2;
    paint.strokeRect(a, top, wide, tall);
  }
  const label = page.title(bar), middle = at + laneHeight / 2;
  if (wide > 40) {
    paint.fillStyle = "#fff";
    paint.fillText(cut(label, wide - 8), a + 4, middle);
  } else if (!bar[ENDED]) {  // what has not ended is named also where its bar is short
    const room = a - left - 8, shown = cut(label, Math.max(0, room));
    const wideLabel = paint.measureText(shown).width;
    paint.fillStyle = background;
    paint.fillRect(a - wideLabel - 8, top, wideLabel + 6, tall);
    paint.fillStyle = text;
    paint.fillText(shown, a - wideLabel - 5, middle);
  }
  paint.globalAlpha = 1;
}
function draw() {
  const scale = window.devicePixelRatio || 1, shown = Math.min(height, box.clientHeight || height);
  left = width() < 700 ? 118 : 200;
  canvas.style.height = shown + "px";
  canvas.width = width() * scale;
  canvas.height = shown * scale;
  paint.scale(scale, scale);
  const text = getComputedStyle(document.body).color, line = color("--line");
  const background = getComputedStyle(document.body).backgroundColor;
  paint.font = "12px system-ui, sans-serif";
  paint.textBaseline = "middle";
  const most = Math.max(2, (width() - left) / 130);
  let step = Math.pow(10, Math.floor(Math.log10((to - from) / most)));
  step *= [1, 2, 5, 10].find(times => (to - from) / (step * times) <= most) || 10;
  step = Math.max(step, page.least);
  const ticks = [];
  for (let t = Math.ceil(time(left) / step) * step; t < to; t += step) ticks.push(t);
  paint.fillStyle = line;
  for (const t of ticks) paint.fillRect(x(t), axis, 1, shown);
  const top = Math.max(0, Math.floor(box.scrollTop / laneHeight) - 1);
  for (let lane = top; lane < lanes.length && y(lane) < shown; lane++) {
    let last = -1;
    for (const bar of lanes[lane]) {
      const a = x(bar[START]), b = x(bar[END]);
      if (b < left || a > width()) continue;
      if (b - a < 1 && Math.floor(a) === last && bar[ENDED] && bar !== pinned && wanted === "") continue;
      last = Math.floor(a);
      drawBar(bar, y(lane), text, background);
    }
  }
  const opaque = /, 0\)$|transparent/.test(background) ? color("--mark") === "#fff" ? "#121212" : "#fff" : background;
  paint.fillStyle = opaque;
  paint.fillRect(0, 0, left, shown);
  for (let lane = top; lane < lanes.length && y(lane) < shown; lane++) {
    const [name, more, marked] = page.lane(data.lanes[lane]), middle = y(lane) + laneHeight / 2;
    if (first[lane]) {
      paint.fillStyle = line;
      paint.fillRect(0, y(lane), width(), 1);
      paint.fillStyle = marked ? color("--bad") : text;
      paint.fillText((marked ? "\u25b6 " : "") + name, 4, middle);
    }
    paint.globalAlpha = 0.75;
    paint.fillStyle = text;
    const start = width() < 700 ? 70 : 78;
    paint.fillText(cut(more, left - start - 4, tail), start, middle);
    paint.globalAlpha = 1;
  }
  paint.fillStyle = opaque;
  paint.fillRect(0, 0, width(), axis);
  paint.fillStyle = text;
  for (const t of ticks) {
    if (x(t) > left + 2 && x(t) < width() - 70) paint.fillText(page.tick(t, to - from), x(t) - 2, axis / 2);
  }
  paint.fillStyle = line;
  paint.fillRect(0, axis - 1, width(), 1);
}
function show(bar) {
  pinned = bar;
  get("pinned").style.display = bar ? "block" : "none";
  get("pinned").textContent = bar ? page.pinned(bar) : "";
  draw();
}
function view(a, b) {
  from = a;
  to = Math.max(a + 1e-5, b);
  draw();
}
function zoom(at, times) { view(at - (at - from) * times, at + (to - at) * times); }
function showLane(index) {
  const lane = index * laneHeight;
  if (lane < box.scrollTop || lane > box.scrollTop + box.clientHeight - axis - laneHeight) {
    box.scrollTop = lane - box.clientHeight / 3;
  }
}
function reveal(bar) {
  const span = to - from;
  if (bar[START] > to || bar[END] < from) view(bar[START] - span / 3, bar[START] + span * 2 / 3);
  showLane(bar[LANE]);
  show(bar);
}
function next(by) {
  const found = data.bars.filter(matches);
  const at = found.indexOf(pinned);
  if (found.length) reveal(found[((at < 0 ? (by > 0 ? 0 : -1) : at + by) + found.length) % found.length]);
}
function barAt(event) {
  const lane = lanes[Math.floor((event.offsetY - axis + box.scrollTop) / laneHeight)];
  if (!lane || event.offsetY < axis || event.offsetX < left) return null;
  return lane.filter(bar => x(bar[START]) - 2 <= event.offsetX &&
    event.offsetX <= Math.max(x(bar[END]), x(bar[START]) + 2) + (bar[ENDED] ? 0 : 7)).pop() || null;
}
canvas.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;  // the page and the lanes scroll
  event.preventDefault();
  zoom(time(event.offsetX), Math.exp(event.deltaY / 400));
}, { passive: false });
let held = null, moved = false;
canvas.addEventListener("pointerdown", event => { held = event.offsetX; moved = false; });
window.addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("click", event => { if (!moved) show(barAt(event)); });
canvas.addEventListener("dblclick", () => view(...home));
canvas.addEventListener("pointermove", event => {
  if (held !== null && Math.abs(event.offsetX - held) > (moved ? 0 : 3)) {
    const by = time(held) - time(event.offsetX);
    held = event.offsetX;
    moved = true;
    view(from + by, to + by);
  }
  const bar = barAt(event), tip = get("tip");
  tip.style.display = bar && held === null ? "block" : "none";
  if (bar) {
    tip.textContent = page.tip(bar);
    place(tip, event);
  }
});
canvas.addEventListener("pointerleave", () => { get("tip").style.display = "none"; });
function search() {
  wanted = get("search").value.trim().toLowerCase();
  const found = wanted === "" ? 0 : data.bars.filter(matches).length;
  get("found").textContent = wanted === "" ? "" : `${found} found`;
  draw();
}
get("search").addEventListener("input", search);
get("search").addEventListener("keydown", event => {
  if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
});
const keys = {
  ArrowLeft: () => view(from - (to - from) / 8, to - (to - from) / 8),
  ArrowRight: () => view(from + (to - from) / 8, to + (to - from) / 8),
  "+": () => zoom((from + to) / 2, 0.7),
  "=": () => zoom((from + to) / 2, 0.7),
  "-": () => zoom((from + to) / 2, 1.4),
  "0": () => view(...home),
  n: () => next(1),
  p: () => next(-1),
  "/": () => get("search").focus(),
  Escape: () => show(null),
};
window.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === get("search")) {
    if (event.key === "Escape") {  // browsers clear the field, and not all of them say so
      get("search").value = "";
      search();
      box.focus();
    }
    return;
  }
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});
box.addEventListener("scroll", draw);
window.addEventListener("resize", draw);
