// State lives in the address after #, so that a view can be reloaded and shared.

const data = JSON.parse(byId("data").textContent);
data.rollouts.forEach((rollout, number) => { rollout.number = number; });

const cache = new Map();
function loadDetail(number) {
  if (!cache.has(number)) {
    if (cache.size > 50) cache.clear();
    cache.set(number, JSON.parse(byId("rollout-" + number).textContent));
  }
  return cache.get(number);
}

const FIELDS = ["policy", "category", "outcome", "score", "sort"];
const index = new TextIndex(data.rollouts, (number) => JSON.parse(byId("rollout-" + number).textContent));
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const list = new LazyList(byId("list"), (rollout) => openRollout(rollout.id));
let shown = [];

function saveState() {
  const kept = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
  history.replaceState(null, "", "#" + kept.toString());
}

function refresh() {
  const query = (state.q || "").trim();
  if (!query) return draw();
  index.prepare((ready) => { if (ready) draw(); else byId("count").textContent = "reading " + index.texts.length + " of " + data.rollouts.length; });
}

function draw() {
  shown = select(data.rollouts, state, index);
  const isAll = shown.length === data.rollouts.length;
  byId("count").textContent = isAll ? whole(shown.length) + " rollouts" : whole(shown.length) + " of " + whole(data.rollouts.length);
  drawTiles(shown, data.summary, isAll);
  drawCharts(shown, data.summary);
  list.show(shown, state.r);
  drawDetail();
}

function drawDetail() {
  const rollout = data.rollouts.find((r) => r.id === state.r);
  document.body.classList.toggle("reading", Boolean(rollout));
  if (rollout) renderDetail(rollout, loadDetail(rollout.number), (state.q || "").trim().toLowerCase(), closeRollout);
  else replace(byId("detail"), h("p", { class: "empty" }, "Choose a rollout to read it. j and k go to the next and the one before."));
}

let listScroll = 0;
function openRollout(id) {
  if (!document.body.classList.contains("reading")) listScroll = scrollY;
  state.r = id;
  saveState();
  list.mark(id);
  drawDetail();
  if (getComputedStyle(byId("list")).display === "none") scrollTo(0, 0);
}

function closeRollout() {
  delete state.r;
  saveState();
  list.mark(undefined);
  drawDetail();
  scrollTo(0, listScroll);
}

function step(by) {
  const at = shown.findIndex((r) => r.id === state.r), next = shown[at === -1 ? 0 : at + by];
  if (!next) return;
  while (list.done < shown.length && shown.indexOf(next) >= list.done) list.more();
  openRollout(next.id);
  byId("list").querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
}

function fillSelect(id, options) {
  replace(byId(id), Object.entries(options).map(([value, name]) => h("option", { value }, name)));
  byId(id).value = state[id] || "";
  byId(id).addEventListener("change", () => { state[id] = byId(id).value; saveState(); refresh(); });
}

function values(field, all) {
  const found = [...new Set(data.rollouts.map((r) => r[field]))].sort();
  return Object.fromEntries([["", all], ...found.map((value) => [value, value])]);
}

function start() {
  byId("source").textContent = data.title;
  fillSelect("policy", values("policy", "all policies"));
  fillSelect("category", values("category", "all categories"));
  fillSelect("outcome", values("outcome", "all outcomes"));
  fillSelect("score", SCORES);
  fillSelect("sort", ORDERS);
  const search = byId("search");
  search.value = state.q || "";
  let pause = 0;
  search.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => { state.q = search.value; saveState(); refresh(); }, 150);
  });
  byId("clear").addEventListener("click", () => {
    for (const field of [...FIELDS, "q"]) delete state[field];
    for (const field of FIELDS) byId(field).value = "";
    search.value = "";
    saveState();
    refresh();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName || "")) return;
    if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "Escape") closeRollout();
    else if (event.key === "/") { event.preventDefault(); search.focus(); }
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (theme) => { document.documentElement.dataset.theme = theme; };
  paint(state.theme || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!state.theme) paint(dark.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => { state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; paint(state.theme); saveState(); });
  byId("fold").open = innerWidth > 720;
  refresh();
}

start();
