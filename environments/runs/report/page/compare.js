// Two runs over the same items: what changed, and two transcripts side by side from where they part.

let data = null, vocabularies = [], list = null;

const CHANGES = { "": "all matched items", fixed: "fixed", broken: "broken", better: "better in B", worse: "worse in B", same: "the same", unscored: "not scored in both" };
const signed = (value, digits = 3) => (value === null || value === undefined ? "–" : (value >= 0 ? "+" : "−") + Math.abs(value).toFixed(digits));
const average = (values) => (values.length ? sum(values) / values.length : null);

function changeOf(item) {
  if (item.difference === null) return "unscored";
  return item.difference > 0 ? "better" : item.difference < 0 ? "worse" : "same";
}

const KIND = { better: "good", worse: "bad", fixed: "good", broken: "bad" };

function chosenItems() {
  const query = (state.q || "").trim().toLowerCase();
  return data.items.filter((item) => (!state.change || changeOf(item) === state.change || item.flip === state.change) && (!query || item.id.toLowerCase().includes(query)));
}

function drawFigures(found) {
  const tile = (name, value, note) => h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "value" }, value), h("div", { class: "note" }, note));
  const interval = found.interval ? "95 % interval " + signed(found.interval[0]) + " to " + signed(found.interval[1]) : "no interval: too few clusters";
  replace(byId("tiles"),
    tile("Difference, B less A", signed(found.difference), interval),
    tile("Mean score of A", fixed(found.mean_a), found.name_a), tile("Mean score of B", fixed(found.mean_b), found.name_b),
    tile("Matched items", whole(found.matched), found.only_a.length + " only in A, " + found.only_b.length + " only in B"),
    tile("Wins, losses, ties", found.wins + " / " + found.losses + " / " + found.ties, "sign test p = " + found.p_value.toPrecision(2)),
    tile("Fixed, broken", found.fixed.length + " / " + found.broken.length, "solved never, then always; or the other way"));
  replace(byId("changes"), bars([...["better", "worse", "same", "unscored"].map((name) => [CHANGES[name], { count: data.items.filter((item) => changeOf(item) === name).length, kind: KIND[name] }]),
    ["fixed", { count: found.fixed.length, kind: "good" }], ["broken", { count: found.broken.length, kind: "bad" }]], data.items.length),
    found.difference_if_zero !== null && h("p", { class: "meta" }, "If lost rollouts counted 0, the difference would be " + signed(found.difference_if_zero) + "."));
}

/** One dot for each place; its size tells how many items share it. */
function drawScatter() {
  const size = 300, pad = 34, scored = data.items.filter((item) => item.difference !== null);
  const values = scored.flatMap((item) => [item.mean_a, item.mean_b]);
  const low = values.reduce((a, b) => Math.min(a, b), 0), high = values.reduce((a, b) => Math.max(a, b), 1);
  const x = (value) => pad + ((value - low) / (high - low)) * (size - pad - 12), y = (value) => size - x(value);
  const picture = svg("svg", { viewBox: `0 0 ${size} ${size}`, class: "scatter", role: "img", "aria-label": "Mean score in A against B of " + scored.length + " items" });
  picture.append(svg("rect", { x: x(low), y: y(high), width: x(high) - x(low), height: y(low) - y(high), class: "frame" }),
    svg("line", { x1: x(low), y1: y(low), x2: x(high), y2: y(high), class: "diagonal" }));
  const places = new Map();
  for (const item of scored) {
    const key = item.mean_a.toFixed(3) + " " + item.mean_b.toFixed(3);
    places.set(key, [...(places.get(key) || []), item]);
  }
  for (const items of places.values()) {
    const { mean_a: a, mean_b: b } = items[0];
    const dot = svg("circle", { cx: x(a).toFixed(1), cy: y(b).toFixed(1), r: Math.min(16, 3.5 + Math.sqrt(items.length)).toFixed(1), class: "dot " + (KIND[changeOf(items[0])] || ""), "data-items": items.length });
    dot.append(svg("title", {}, `A ${plain(a)}, B ${plain(b)}: ${counted(items.length, "item")}, ${items[0].id}`));
    dot.addEventListener("click", () => openItem(items[0].id));
    picture.append(dot);
  }
  for (const value of [low, high]) picture.append(svg("text", { x: x(value), y: size - 14 }, plain(value)), svg("text", { x: 14, y: y(value) + 4 }, plain(value)));
  picture.append(svg("text", { x: size / 2, y: size - 2 }, "A"), svg("text", { x: 6, y: size / 2 }, "B"));
  replace(byId("scatter"), picture);
}

function renderItem(item, place, total, current, onOpen) {
  const row = h("button", { class: "row", type: "button", "data-id": item.id, "aria-current": item.id === current ? "true" : null, onclick: () => onOpen(item) },
    h("span", { class: "line" }, chip(item.difference === null ? "not compared" : signed(item.difference), KIND[changeOf(item)]), item.flip && chip(item.flip, KIND[item.flip])),
    h("span", { class: "asked" }, item.id), h("span", { class: "meta" }, "A " + fixed(item.mean_a) + " of " + item.a.length + " · B " + fixed(item.mean_b) + " of " + item.b.length + (item.category ? " · " + item.category : "")));
  return h("div", { class: "place", role: "listitem", "aria-posinset": place + 1, "aria-setsize": total }, row);
}

/** The two rollouts to show first: of those whose scores differ as the item does. */
function firstPair(item) {
  const score = (number) => data.rollouts[number].verifier ?? -1;
  const sign = Math.sign(item.difference || 0);
  const scored = (numbers) => { const kept = numbers.filter((number) => data.rollouts[number].verifier !== null); return kept.length ? kept : numbers; };
  const order = (numbers, way) => scored(numbers).sort((p, q) => way * (score(p) - score(q)))[0];
  return sign === 0 ? [scored(item.a)[0], scored(item.b)[0]] : [order(item.a, sign), order(item.b, -sign)];
}

function chooser(name, numbers, current, onChange) {
  const select = h("select", { class: "colour", "aria-label": "Rollout of " + name, onchange: () => onChange(Number(select.value)) },
    numbers.map((number) => h("option", { value: number, selected: number === current }, data.rollouts[number].id + ": " + (data.rollouts[number].verifier === null ? "no score" : "score " + plain(data.rollouts[number].verifier)))));
  return select;
}

async function drawItem(left, right) {
  const item = data.items.find((candidate) => candidate.id === state.i);
  document.body.classList.toggle("reading", Boolean(item));
  if (!item) {
    replace(byId("detail"), h("p", { class: "empty" }, "Choose an item to read one rollout of each run side by side; j and k go to the next and the one before."));
    document.body.dataset.ready = "list";
    return;
  }
  const [first, second] = left === undefined ? firstPair(item) : [left, right];
  const details = await Promise.all([first, second].map(readDetail)), parting = firstDifference(details[0].entries, details[1].entries);
  const side = (number, detail, name, all) => {
    const from = parting === -1 ? detail.entries.length : parting, rollout = data.rollouts[number];
    const before = h("details", {}, h("summary", {}, from + " messages that both have"), h("div", { class: "talk" }, detail.entries.slice(0, from).map((entry) => renderEntry(entry, "", rollout, detail))));
    return h("section", { class: "side", "aria-label": name }, h("h3", {}, name), chooser(name, all, number, (chosen) => (name === "A" ? drawItem(chosen, second) : drawItem(first, chosen))),
      h("div", { class: "chips" }, scoreChip(rollout), chip(rollout.outcome, outcomeKind(rollout)), chip(rollout.policy)), before,
      h("div", { class: "talk" }, detail.entries.slice(from).map((entry) => renderEntry(entry, "", rollout, detail))));
  };
  const turn = details.map((detail) => detail.entries[parting]?.turn?.turn).find(Boolean);
  replace(byId("detail"), h("button", { class: "back quiet", type: "button", onclick: closeItem }, "Back to the list"), h("h2", {}, item.id),
    h("p", { class: "meta" }, parting === -1 ? "Both rollouts say the same." : "They part at " + (turn ? "turn " + turn : "message " + (parting + 1)) + "."),
    h("div", { class: "sides" }, side(first, details[0], "A", item.a), side(second, details[1], "B", item.b)));
  document.body.dataset.ready = item.id;
}

function openItem(id) {
  state.i = id;
  saveState();
  list.mark(id);
  drawItem();
  if (getComputedStyle(byId("list")).display === "none") scrollTo(0, 0);
}

/** The next item of the list, or the one before. */
function go(by) {
  const items = chosenItems(), place = Math.max(0, items.findIndex((item) => item.id === state.i) + (state.i ? by : 0));
  if (!items[place]) return;
  openItem(items[place].id);
  list.reveal(place, false);
}

function closeItem() {
  delete state.i;
  saveState();
  list.mark(undefined);
  drawItem();
}

function refresh() {
  const items = chosenItems();
  byId("count").textContent = whole(items.length) + " of " + whole(data.items.length) + " items";
  list.show(items, state.i);
}

async function start() {
  paintTheme();
  [data, vocabularies] = await Promise.all([unpack(byId("index").textContent), unpack(byId("vocabularies").textContent)]);
  setChunks(data.chunks);
  byId("source").textContent = visible(data.comparison.name_a + " (A) against " + data.comparison.name_b + " (B)");
  list = new VirtualList(byId("list"), (item) => openItem(item.id), renderItem);
  replace(byId("change"), Object.entries(CHANGES).map(([value, name]) => h("option", { value }, name)));
  byId("change").value = state.change || "";
  byId("search").value = state.q || "";
  byId("change").addEventListener("change", () => { state.change = byId("change").value; saveState(); refresh(); });
  byId("search").addEventListener("input", () => { state.q = byId("search").value; saveState(); refresh(); });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT/.test(document.activeElement?.tagName || "")) return;
    ({ j: () => go(1), k: () => go(-1), Escape: closeItem })[event.key]?.();
  });
  drawFigures(data.comparison);
  drawScatter();
  refresh();
  await drawItem();
  if (state.i) byId("detail").scrollIntoView();
}

start();
