// The list of rollouts: filters, order, full-text search; only the rows in view exist.

const SPARE_ROWS = 8;
const SCORES = { "": "any score", solved: "solved", partial: "partly right", zero: "zero", none: "no score" };
const ORDERS = { "": "file order", low: "lowest score first", high: "highest score first", slow: "slowest first", long: "most turns first", up: "pushed up most", down: "pushed down most" };

const scoreClass = (r) => (r.verifier === null ? "none" : r.solved ? "solved" : r.verifier > 0 ? "partial" : "zero");

const COMPARE = {
  low: (a, b) => (a.verifier ?? 9) - (b.verifier ?? 9),
  high: (a, b) => (b.verifier ?? -9) - (a.verifier ?? -9),
  slow: (a, b) => b.time[4] - a.time[4],
  long: (a, b) => b.turns - a.turns,
  up: (a, b) => (b.advantage ?? -9) - (a.advantage ?? -9),
  down: (a, b) => (a.advantage ?? 9) - (b.advantage ?? 9),
};

/** Texts are read from the page's data once, chunk by chunk, so that typing never waits for a large file. */
class TextIndex {
  constructor(rollouts, load) {
    this.rollouts = rollouts;
    this.load = load;
    this.texts = [];
  }

  /** Reads on until all texts are there; `onProgress` after each part. */
  async prepare(onProgress) {
    while (this.texts.length < this.rollouts.length) {
      const number = this.texts.length, detail = await this.load(number);
      if (this.texts.length === number) this.texts.push(this.read(number, detail));
      if (this.texts.length % 500 === 0) onProgress();
    }
  }

  read(number, data) {
    const rollout = this.rollouts[number], found = [rollout.id, rollout.item, rollout.outcome, data.error || ""];
    for (const entry of data.entries) {
      found.push(entry.text, entry.reasoning || "");
      for (const call of entry.calls) found.push(call.name, call.status, call.arguments, call.written || "", call.result || "", call.error || "", call.repairs.join(" "));
    }
    return found.join("\n").toLowerCase();
  }

  has(number, query) {
    return number < this.texts.length && this.texts[number].includes(query);
  }
}

function select(rollouts, state, index) {
  const query = (state.q || "").trim().toLowerCase();
  const chosen = rollouts.filter((r) =>
    (!state.policy || r.policy === state.policy) && (!state.category || r.category === state.category) &&
    (!state.outcome || r.outcome === state.outcome) && (!state.score || scoreClass(r) === state.score) &&
    (!state.step || stepOf(r) === state.step) && (!query || index.has(r.number, query)));
  return COMPARE[state.sort] ? chosen.sort(COMPARE[state.sort]) : chosen;
}

/** The training step or evaluation that a rollout belongs to: given, or the weights that sampled it. */
const stepOf = (r) => r.step || (r.weights ? "weights " + r.weights : "");

function advantageChip(rollout) {
  if (rollout.advantage === undefined) return null;
  return chip("adv " + (rollout.advantage >= 0 ? "+" : "−") + Math.abs(rollout.advantage).toFixed(2), rollout.advantage > 0 ? "good" : rollout.advantage < 0 ? "bad" : "");
}

function renderRow(rollout, place, total, current, onOpen) {
  const calls = sum(Object.values(rollout.calls));
  const facts = [rollout.policy, rollout.category, counted(rollout.turns, "turn"), counted(calls, "call"), seconds(rollout.time[4])];
  const row = h("button", { class: "row", type: "button", "data-id": rollout.id, "aria-current": rollout.id === current ? "true" : null, onclick: () => onOpen(rollout) },
    h("span", { class: "line" }, scoreChip(rollout), chip(rollout.outcome, outcomeKind(rollout)), advantageChip(rollout), rollout.repaired > 0 && chip(rollout.repaired + " repaired", "warn"), rollout.truncations > 0 && chip("truncated", "warn")),
    h("span", { class: "asked" }, rollout.asked || rollout.id), h("span", { class: "meta" }, facts.map((fact, place) => [place > 0 && " · ", h("bdi", {}, fact)])));
  return h("div", { class: "place", role: "listitem", "aria-posinset": place + 1, "aria-setsize": total }, row);
}

/** Rows all have one height, so that the place of each is known without drawing it. */
class VirtualList {
  constructor(node, onOpen, render = renderRow) {
    this.node = node;
    this.onOpen = onOpen;
    this.render = render;
    this.rollouts = [];
    this.rows = new Map();
    this.room = h("div", { class: "room", role: "list", "aria-label": "Rollouts" });
    this.empty = h("p", { class: "empty" }, "No rollout passes these filters.");
    replace(node, this.empty, this.room);
    const drawSoon = () => { this.waiting ||= requestAnimationFrame(() => { this.waiting = 0; this.draw(); }); };
    node.addEventListener("scroll", drawSoon, { passive: true });
    addEventListener("scroll", drawSoon, { passive: true });
    addEventListener("resize", drawSoon);
    node.addEventListener("keydown", (event) => this.key(event));
  }

  get height() {
    return parseFloat(getComputedStyle(this.node).getPropertyValue("--row")) || 104;
  }

  show(rollouts, current) {
    const focused = this.node.contains(document.activeElement) ? document.activeElement.dataset.id : undefined;
    this.rollouts = rollouts;
    this.current = current;
    this.empty.hidden = rollouts.length > 0;
    this.room.style.height = rollouts.length * this.height + "px";
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.draw();
    const place = focused === undefined ? -1 : rollouts.findIndex((r) => r.id === focused);
    if (place >= 0) this.rowAt(place).firstChild.focus({ preventScroll: true });
  }

  draw() {
    const height = this.height, own = this.node.getBoundingClientRect(), room = this.room.getBoundingClientRect();
    const from = Math.max(0, Math.floor((Math.max(own.top, 0) - room.top) / height) - SPARE_ROWS);
    const to = Math.min(this.rollouts.length, Math.ceil((Math.min(own.bottom, innerHeight) - room.top) / height) + SPARE_ROWS);
    for (const [place, row] of this.rows) {
      if ((place < from || place >= to) && !row.contains(document.activeElement)) { row.remove(); this.rows.delete(place); }
    }
    for (let place = from; place < to; place += 1) this.rowAt(place);
  }

  rowAt(place) {
    let row = this.rows.get(place);
    if (!row) {
      row = this.render(this.rollouts[place], place, this.rollouts.length, this.current, this.onOpen);
      row.style.top = place * this.height + "px";
      this.rows.set(place, row);
      const next = [...this.rows.keys()].filter((other) => other > place).sort((a, b) => a - b)[0];
      this.room.insertBefore(row, next === undefined ? null : this.rows.get(next));
    }
    return row;
  }

  key(event) {
    const at = this.rollouts.findIndex((r) => r.id === document.activeElement?.dataset?.id);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 6, PageUp: at - 6, Home: 0, End: this.rollouts.length - 1 }[event.key];
    if (to === undefined || at === -1) return;
    event.preventDefault();
    this.reveal(Math.max(0, Math.min(this.rollouts.length - 1, to)), true);
  }

  reveal(place, focus) {
    if (!this.rollouts[place]) return;
    const row = this.rowAt(place);
    row.scrollIntoView({ block: "nearest" });
    if (focus) row.firstChild.focus({ preventScroll: true });
    this.draw();
  }

  mark(id) {
    this.current = id;
    for (const row of this.node.querySelectorAll(".row")) {
      if (row.dataset.id === id) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }
}
