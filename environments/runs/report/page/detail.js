// One rollout as a conversation.

const LONG_LINES = 16;

function scoreChip(rollout) {
  if (rollout.verifier === null) return chip("no score", INFRASTRUCTURE);
  const kind = rollout.solved ? "good" : rollout.verifier > 0 ? "warn" : "bad";
  return chip("score " + Number(rollout.verifier.toFixed(3)), kind);
}

/** Text with every occurrence of the search marked. */
function marked(text, query) {
  if (!query) return [text];
  const found = [], lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(query); at !== -1 && found.length < 400; at = lower.indexOf(query, from)) {
    found.push(text.slice(from, at), h("mark", {}, text.slice(at, at + query.length)));
    from = at + query.length;
  }
  return [...found, text.slice(from)];
}

function pairs(title, entries) {
  const rows = entries.filter(([, value]) => value !== "" && value !== null);
  if (!rows.length) return null;
  return h("div", {}, title && h("h3", {}, title), h("dl", { class: "pairs" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))])));
}

function block(text, kind, query) {
  const pre = h("pre", { class: kind, tabindex: "0" }, marked(text, query));
  if (text.split("\n").length <= LONG_LINES) return [pre];
  const more = h("button", { class: "more", type: "button", onclick: () => { more.textContent = pre.classList.toggle("full") ? "Show less" : "Show all"; } }, "Show all");
  return [pre, more];
}

function renderCall(call, query) {
  const head = h("div", { class: "head" }, h("b", {}, call.name), call.status && chip(call.status, STATUS_KIND[call.status] || ""),
    call.exit_code !== null && call.exit_code !== undefined && chip("exit " + call.exit_code, call.exit_code ? "warn" : ""),
    call.repairs.map((repair) => chip("repaired: " + repair, "warn")), call.duplicate && chip("duplicate", "warn"), call.nested && chip("from a script"),
    call.duration_s !== null && call.duration_s !== undefined && h("span", { class: "meta" }, seconds(call.duration_s)));
  const box = h("div", { class: call.nested ? "call nested" : "call" }, head, block(call.arguments || "(no arguments)", "arguments", query));
  if (call.written !== null && call.written !== call.arguments) append(box, [h("div", { class: "note warn" }, "As the model wrote it:"), block(call.written, "written", query)]);
  if (call.error) append(box, [h("div", { class: "note bad" }, call.error)]);
  if (call.result !== null && call.result !== "") append(box, block(call.result, "result", query));
  if (call.stored) append(box, [h("div", { class: "note" }, "Shortened for the model: " + call.stored)]);
  return box;
}

function turnFacts(turn) {
  if (!turn) return null;
  const facts = ["model " + seconds(turn.model_s)];
  if (turn.tools_s) facts.push("tools " + seconds(turn.tools_s));
  if (turn.sampled_tokens) facts.push(whole(turn.sampled_tokens) + " tokens");
  if (turn.prompt_tokens) facts.push("prompt " + whole(turn.prompt_tokens));
  if (turn.finish_reason && !["stop", "tool_calls"].includes(turn.finish_reason)) facts.push("ended by " + turn.finish_reason);
  if (turn.retries) facts.push(turn.retries + " retries");
  if (turn.parallel) facts.push("calls in parallel");
  return facts.map((fact) => h("span", {}, fact));
}

function renderEntry(entry, query, rollout, data) {
  if (entry.role === "truncation") return h("div", { class: "marker" }, entry.text);
  const example = entry.role === "assistant" && !entry.turn;
  const who = h("div", { class: "who" }, h("b", {}, example ? "Example answer" : entry.role), entry.turn && h("span", {}, "turn " + entry.turn.turn), turnFacts(entry.turn));
  const box = h("div", { class: "message " + entry.role.replace(/[^a-z]/g, "") + (example ? " example" : "") }, who);
  if (entry.reasoning) box.append(h("details", { class: "reasoning", open: Boolean(query) && entry.reasoning.toLowerCase().includes(query) }, h("summary", {}, "Thinking"), h("div", { class: "text" }, marked(entry.reasoning, query))));
  if (entry.text) box.append(h("div", { class: "text" }, marked(entry.text, query)));
  append(box, entry.calls.map((call) => renderCall(call, query)));
  if (entry.turn && data.tokens.length) box.append(tokensOfTurn(entry, rollout, data));
  return box;
}

/** A turn opens into its tokens; they are made when it does. */
function tokensOfTurn(entry, rollout, data) {
  const repairs = entry.calls.flatMap((call) => call.repairs), body = h("div", {});
  const fold = h("details", { class: "turn-tokens" }, h("summary", {}, "Tokens of turn " + entry.turn.turn), body);
  const draw = () => replace(body, colourChoice(data, state.by || "logprob", (by) => { state.by = by; saveState(); draw(); }),
    repairs.length > 0 && h("div", { class: "marker" }, "What this turn wrote was repaired before it ran: " + repairs.join(", ")),
    turnTokens(rollout, data, entry.turn.turn, state.by || "logprob"));
  fold.addEventListener("toggle", () => { if (fold.open) draw(); });
  return fold;
}

function showToken(segment, position) {
  const block = document.querySelectorAll(".segment .token-block")[segment];
  block.scrollIntoView({ block: "center" });
  requestAnimationFrame(() => block.reveal(position));
}

/** What `verify --against` says of this rollout, with a way to each token that differs. */
function againstNote(differences) {
  if (!differences.length) return null;
  const beyond = differences.filter((difference) => difference[4]), sentence = beyond.length + " of " + differences.length + " positions that verify --against asked about are beyond the tolerance. ";
  const places = beyond.slice(0, 20).map(([segment, position]) => h("button", { class: "more", type: "button", onclick: () => { state.v = "tokens"; saveState(); drawDetail().then(() => showToken(segment, position)); } }, "segment " + (segment + 1) + ", position " + position));
  return h("p", { class: beyond.length ? "alert" : "meta" }, sentence, places);
}

function renderTokens(rollout, data) {
  const choice = colourChoice(data, state.by || "logprob", (by) => setView("by", by));
  const cuts = data.entries.filter((entry) => entry.role === "truncation").map((entry) => h("div", { class: "marker" }, entry.text));
  return [choice, cuts, allTokens(rollout, data, state.by || "logprob")];
}

function renderDetail(rollout, data, query) {
  const total = rollout.score === null ? [] : [["reward", rollout.score]];
  const tokens = state.v === "tokens" && data.tokens.length > 0;
  replace(byId("detail"),
    h("button", { class: "back quiet", type: "button", onclick: closeRollout }, "Back to the list"),
    h("h2", {}, rollout.id),
    h("div", { class: "views" }, h("button", { class: "quiet", type: "button", "aria-pressed": String(tokens), disabled: !data.tokens.length, onclick: () => setView("v", tokens ? "" : "tokens") }, data.tokens.length ? "All tokens" : "No tokens"),
      h("button", { class: "quiet", type: "button", onclick: () => openGroup(rollout.group) }, "Its group")),
    h("div", { class: "chips" }, scoreChip(rollout), advantageChip(rollout), chip(rollout.outcome, outcomeKind(rollout)), chip(rollout.policy), chip(rollout.category),
      rollout.cause && chip(rollout.cause, causeKind(rollout.cause)), !rollout.trainable && chip("not trained on", INFRASTRUCTURE)),
    data.error && h("p", { class: "alert" }, data.error),
    againstNote(data.differences || []),
    timeBar([rollout.time]),
    h("div", { class: "facts" }, pairs("Reward", [...data.components, ...total]), pairs("Rollout", data.facts)),
    h("details", {}, h("summary", {}, data.metrics.length === 1 ? "1 metric" : "All " + data.metrics.length + " metrics"), h("div", { class: "facts" }, pairs("", data.metrics))),
    tokens ? renderTokens(rollout, data) : h("div", { class: "talk" }, data.entries.map((entry) => renderEntry(entry, query, rollout, data))));
}
