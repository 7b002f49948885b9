// State lives in the address after #, so that a view can be reloaded and shared.

let data = null, vocabularies = [], index = null, list = null, shown = [];
const FIELDS = ["policy", "category", "outcome", "score", "step", "sort"];

const fetched = new Map();
function askServer(number) {
  if (!fetched.has(number)) {
    if (fetched.size > 500) fetched.clear();
    fetched.set(number, fetch("rollout/" + number).then((answer) => answer.json()));
  }
  return fetched.get(number);
}

function loadDetail(number) {
  return data.live ? askServer(number) : readDetail(number);
}

let search = 0, waiting = null;
async function refresh(show = draw) {
  waiting = waiting === draw ? draw : show; // where news come while texts are read, all is drawn after them
  const query = (state.q || "").trim(), own = (search += 1);
  if (query) {
    await index.prepare(() => { if (own === search) byId("count").textContent = "reading " + whole(index.texts.length) + " of " + whole(data.rollouts.length); });
    if (own !== search) return;
  }
  [show, waiting] = [waiting, null];
  show();
}

function draw() {
  drawFound();
  drawDetail();
}

function drawFound() {
  shown = select(data.rollouts, state, index);
  const isAll = shown.length === data.rollouts.length;
  byId("count").textContent = isAll ? counted(shown.length, "rollout") : whole(shown.length) + " of " + whole(data.rollouts.length);
  drawTiles(shown, data.summary, isAll);
  drawCharts(shown, data.summary);
  list.show(shown, state.r);
}

const EMPTY = "Choose a rollout to read it. j and k go to the next and the one before, t shows its tokens, g its group.";
let drawing = 0;
async function drawDetail() {
  const own = (drawing += 1);
  const rollout = data.rollouts.find((r) => r.id === state.r), members = state.g ? data.rollouts.filter((r) => r.group === state.g) : [];
  document.body.classList.toggle("reading", Boolean(rollout || members.length));
  if (members.length) {
    const details = await Promise.all(members.map((r) => loadDetail(r.number)));
    if (own === drawing) renderGroup(state.g, members, details, (r) => openRollout(r.id), closeGroup);
  } else if (rollout) {
    const detail = await loadDetail(rollout.number);
    if (own === drawing) renderDetail(rollout, detail, (state.q || "").trim().toLowerCase());
  } else {
    replace(byId("detail"), h("p", { class: "empty" }, EMPTY));
  }
  if (own === drawing) document.body.dataset.ready = String(own);
}

let listScroll = 0;
function openRollout(id) {
  if (!document.body.classList.contains("reading")) listScroll = scrollY;
  state.r = id;
  delete state.g;
  saveState();
  list.mark(id);
  drawDetail();
  if (getComputedStyle(byId("list")).display === "none") scrollTo(0, 0);
}

function openGroup(group) {
  if (!group) return;
  state.g = group;
  saveState();
  drawDetail();
}

function closeGroup() {
  delete state.g;
  saveState();
  drawDetail();
}

function closeRollout() {
  delete state.r;
  delete state.g;
  saveState();
  list.mark(undefined);
  drawDetail();
  scrollTo(0, listScroll);
}

async function setView(name, value) {
  if (value) state[name] = value;
  else delete state[name];
  saveState();
  await drawDetail();
  if (value === "tokens") document.querySelector("#detail .legend")?.scrollIntoView();
}

function go(by) {
  const at = shown.findIndex((r) => r.id === state.r), place = at === -1 ? 0 : at + by;
  if (!shown[place]) return;
  openRollout(shown[place].id);
  list.reveal(place, false);
}

function fillSelect(id, options) {
  const names = Object.keys(options).join("\n");
  if (byId(id).dataset.names === names && byId(id).value === (state[id] || "")) return; // one may be open
  byId(id).dataset.names = names;
  replace(byId(id), Object.entries(options).map(([value, name]) => h("option", { value }, name)));
  byId(id).value = state[id] || "";
}

function values(field, all) {
  const found = [...new Set(data.rollouts.map(typeof field === "string" ? (r) => r[field] : field))].filter(Boolean).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return Object.fromEntries([["", all], ...found.map((value) => [value, value])]);
}

function fillFilters() {
  fillSelect("policy", values("policy", "all policies"));
  fillSelect("category", values("category", "all categories"));
  fillSelect("outcome", values("outcome", "all outcomes"));
  fillSelect("score", SCORES);
  const steps = values(stepOf, "all steps");
  byId("step").hidden = Object.keys(steps).length < 3 && !state.step;
  fillSelect("step", steps);
  fillSelect("sort", ORDERS);
}

/** What came since the page was opened. */
function take(news) {
  data.summary = news.summary;
  for (const rollout of news.rollouts) { rollout.number = data.rollouts.length; data.rollouts.push(rollout); }
  for (const [number, advantage] of Object.entries(news.advantages)) Object.assign(data.rollouts[number], advantage);
  if (!news.rollouts.length) return;
  fillFilters();
  refresh(drawFound); // what is read stays as it is
}

const KEYS = {
  j: () => go(1),
  k: () => go(-1),
  t: () => state.r && setView("v", state.v === "tokens" ? "" : "tokens"),
  g: () => (state.g ? closeGroup() : openGroup(data.rollouts.find((r) => r.id === state.r)?.group)),
  Escape: () => (state.g ? closeGroup() : closeRollout()),
  "/": (event) => { event.preventDefault(); byId("search").focus(); },
};

function listen() {
  for (const id of FIELDS) byId(id).addEventListener("change", () => { state[id] = byId(id).value; saveState(); refresh(); });
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
    KEYS[event.key]?.(event);
  });
  addEventListener("hashchange", () => {
    for (const name of Object.keys(state)) delete state[name];
    Object.assign(state, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    search.value = state.q || "";
    fillFilters();
    refresh();
  });
}

async function start() {
  paintTheme();
  [data, vocabularies] = await Promise.all([unpack(byId("index").textContent), unpack(byId("vocabularies").textContent)]);
  data.rollouts.forEach((rollout, number) => { rollout.number = number; });
  setChunks(data.chunks);
  index = new TextIndex(data.rollouts, loadDetail);
  list = new VirtualList(byId("list"), (rollout) => openRollout(rollout.id));
  byId("source").textContent = visible(data.title);
  byId("fold").open = innerWidth > 720;
  fillFilters();
  listen();
  await refresh();
  if (state.r || state.g) byId("detail").scrollIntoView(); // whoever follows a link wants what it names
  if (data.live) follow(take);
}

start();
