// The list of rollouts: filters, order, full-text search, rows made as they come into view.

const PAGE = 60;
const SCORES = { "": "any score", solved: "solved", partial: "partly right", zero: "zero", none: "no score" };
const ORDERS = { "": "file order", low: "lowest score first", high: "highest score first", slow: "slowest first", long: "most turns first" };

const scoreClass = (r) => (r.verifier === null ? "none" : r.solved ? "solved" : r.verifier > 0 ? "partial" : "zero");

const COMPARE = {
  low: (a, b) => (a.verifier ?? 9) - (b.verifier ?? 9),
  high: (a, b) => (b.verifier ?? -9) - (a.verifier ?? -9),
  slow: (a, b) => b.time[4] - a.time[4],
  long: (a, b) => b.turns - a.turns,
};

/** Texts are read from the page's data elements once, in slices, so that typing never waits for a large file. */
class TextIndex {
  constructor(rollouts, load) {
    this.rollouts = rollouts;
    this.load = load;
    this.texts = [];
  }

  /** Calls back with true when all texts are read; again and again with false until then. */
  prepare(onProgress) {
    if (this.texts.length === this.rollouts.length) return onProgress(true);
    const until = performance.now() + 30;
    while (this.texts.length < this.rollouts.length && performance.now() < until) this.texts.push(this.read(this.texts.length));
    onProgress(this.texts.length === this.rollouts.length);
    if (this.texts.length < this.rollouts.length) setTimeout(() => this.prepare(onProgress), 0);
  }

  read(index) {
    const rollout = this.rollouts[index], data = this.load(index), found = [rollout.id, rollout.item, rollout.outcome, data.error || ""];
    for (const entry of data.entries) {
      found.push(entry.text, entry.reasoning || "");
      for (const call of entry.calls) found.push(call.name, call.status, call.arguments, call.written || "", call.result || "", call.error || "", call.repairs.join(" "));
    }
    return found.join("\n").toLowerCase();
  }

  has(index, query) {
    return index < this.texts.length && this.texts[index].includes(query);
  }
}

function select(rollouts, state, index) {
  const query = (state.q || "").trim().toLowerCase();
  const chosen = rollouts.filter((r) =>
    (!state.policy || r.policy === state.policy) && (!state.category || r.category === state.category) &&
    (!state.outcome || r.outcome === state.outcome) && (!state.score || scoreClass(r) === state.score) &&
    (!query || index.has(r.number, query)));
  return COMPARE[state.sort] ? chosen.sort(COMPARE[state.sort]) : chosen;
}

function renderRow(rollout, current, onOpen) {
  const calls = sum(Object.values(rollout.calls));
  const facts = [rollout.policy, rollout.category, rollout.turns + " turns", calls + " calls", seconds(rollout.time[4])];
  return h("button", { class: "row", type: "button", role: "listitem", "data-id": rollout.id, "aria-current": rollout.id === current ? "true" : null, onclick: () => onOpen(rollout) },
    h("div", { class: "line" }, scoreChip(rollout), chip(rollout.outcome, outcomeKind(rollout)), rollout.repaired > 0 && chip(rollout.repaired + " repaired", "warn"), rollout.truncations > 0 && chip("truncated", "warn")),
    h("div", { class: "asked" }, rollout.asked || rollout.id), h("div", { class: "meta" }, facts.join(" · ")));
}

class LazyList {
  constructor(node, onOpen) {
    this.node = node;
    this.onOpen = onOpen;
    this.watcher = new IntersectionObserver((seen) => { if (seen.some((entry) => entry.isIntersecting)) this.more(); }, { rootMargin: "600px" });
  }

  show(rollouts, current) {
    this.rollouts = rollouts;
    this.current = current;
    this.done = 0;
    this.watcher.disconnect();
    replace(this.node, rollouts.length ? null : h("p", { class: "empty" }, "No rollout passes these filters."));
    this.more();
  }

  more() {
    const next = this.rollouts.slice(this.done, this.done + PAGE);
    this.done += next.length;
    append(this.node, next.map((rollout) => renderRow(rollout, this.current, this.onOpen)));
    this.watcher.disconnect();
    if (this.done < this.rollouts.length && this.node.lastElementChild) this.watcher.observe(this.node.lastElementChild);
  }

  mark(id) {
    this.current = id;
    for (const row of this.node.querySelectorAll(".row")) {
      if (row.dataset.id === id) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }
}
