// Charts over the rollouts that pass the filters.

const TIME_NAMES = ["model", "tools", "waiting", "verifying", "other"];
const INFRASTRUCTURE = "infra";

function outcomeKind(rollout) {
  if (!rollout.trainable) return INFRASTRUCTURE;
  return rollout.outcome === "finished" ? "good" : "warn";
}

function causeKind(cause) {
  if (cause.startsWith("infrastructure")) return INFRASTRUCTURE;
  return cause.startsWith("limit") ? "warn" : "bad";
}

const STATUS_KIND = { ok: "good", error: "warn", timeout: "warn", invalid: "bad", unknown: "bad", malformed: "bad", lost: INFRASTRUCTURE };

/** Name -> {count, kind}, most frequent first. */
function tally(pairs) {
  const found = new Map();
  for (const [name, kind, count = 1] of pairs) {
    const entry = found.get(name) || { count: 0, kind };
    entry.count += count;
    found.set(name, entry);
  }
  return [...found].sort((a, b) => b[1].count - a[1].count);
}

function bars(entries, total) {
  if (!entries.length) return h("p", { class: "empty" }, "none");
  const most = Math.max(1, ...entries.map(([, entry]) => entry.count));
  return h("div", { class: "bars" }, entries.map(([name, entry]) => {
    const fill = h("div", { class: "fill " + (entry.kind || "") });
    fill.style.width = (100 * entry.count) / most + "%";
    const share = total ? " · " + percent(entry.count / total) : "";
    return [h("span", { class: "label" }, name), h("div", { class: "track" }, fill), h("span", { class: "amount" }, whole(entry.count) + share)];
  }));
}

function histogram(scores) {
  if (!scores.length) return h("p", { class: "empty" }, "no scores");
  const low = scores.reduce((a, b) => Math.min(a, b), 0), high = scores.reduce((a, b) => Math.max(a, b), 1), bins = 20;
  const counts = new Array(bins).fill(0);
  for (const score of scores) counts[Math.min(bins - 1, Math.floor(((score - low) / (high - low)) * bins))] += 1;
  const most = Math.max(...counts), width = 320, height = 118, floor = 98;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "histogram", role: "img", "aria-label": "Score distribution" });
  counts.forEach((count, bin) => {
    const tall = count ? Math.max(2, (count / most) * (floor - 18)) : 0, x = (bin * width) / bins;
    picture.append(svg("rect", { x: x + 1, y: floor - tall, width: width / bins - 2, height: tall, rx: 2 }));
    if (count) picture.append(svg("text", { x: x + width / bins / 2, y: floor - tall - 4 }, count));
  });
  for (const [at, value] of [[0.02, low], [0.5, (low + high) / 2], [0.97, high]]) picture.append(svg("text", { x: at * width + 4, y: height - 4 }, Number(value.toFixed(2))));
  return picture;
}

/** Model, tools, waiting, verifying, and what is left of the total. */
function timeParts(times) {
  const parts = [0, 1, 2, 3].map((index) => sum(times.map((time) => time[index])));
  return [...parts, sum(times.map((time) => Math.max(0, time[4] - time[0] - time[1] - time[2] - time[3])))];
}

function timeBar(times) {
  const parts = timeParts(times), total = sum(parts);
  if (!total) return h("p", { class: "empty" }, "no times");
  const stack = h("div", { class: "stack" }), legend = h("div", { class: "legend" });
  parts.forEach((part, index) => {
    if (!part) return;
    const piece = h("div", { class: "part-" + TIME_NAMES[index], title: TIME_NAMES[index] + ": " + seconds(part) });
    piece.style.width = (100 * part) / total + "%";
    stack.append(piece);
    legend.append(h("span", {}, h("i", { class: "swatch part-" + TIME_NAMES[index] }), TIME_NAMES[index] + " " + seconds(part) + " (" + percent(part / total) + ")"));
  });
  return h("div", {}, stack, legend);
}

function card(title, body) {
  return h("div", { class: "card" }, h("h2", {}, title), body);
}

function sliceTable(first, slices) {
  const ks = [...new Set(slices.flatMap((slice) => Object.keys(slice.pass_at).map(Number)))].filter((k) => k > 1).sort((a, b) => a - b).slice(-2);
  const head = [first, "score", ...ks.map((k) => "pass@" + k), "reward", "rollouts", "lost", "valid calls"];
  const rows = slices.map((slice) => [
    slice.name,
    fixed(slice.mean_score) + (slice.standard_error === null ? "" : " ± " + fixed(slice.standard_error)),
    ...ks.map((k) => percent(slice.pass_at[k])),
    fixed(slice.mean_reward), slice.rollouts, slice.losses.rollouts, percent(slice.calls.valid_rate),
  ]);
  return h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))))));
}

function drawCharts(shown, summary) {
  const calls = tally(shown.flatMap((r) => Object.entries(r.calls).map(([name, count]) => [name, STATUS_KIND[name], count])));
  const repaired = sum(shown.map((r) => r.repaired)), attempted = sum(calls.map(([, entry]) => entry.count));
  if (repaired) calls.push(["of these repaired", { count: repaired, kind: "warn" }]);
  replace(byId("charts"),
    card("Verifier scores", histogram(shown.map((r) => r.verifier).filter((score) => score !== null))),
    card("Outcomes", bars(tally(shown.map((r) => [r.outcome, outcomeKind(r)])), shown.length)),
    card("Why no full score", bars(tally(shown.filter((r) => r.cause).map((r) => [r.cause, causeKind(r.cause)])), shown.length)),
    card("Tool calls", bars(calls, attempted)),
    card("Where the time went", timeBar(shown.map((r) => r.time))));
  replace(byId("tables"),
    card("By policy (whole run)", sliceTable("policy", summary.policies)),
    card("By category (whole run)", sliceTable("category", summary.categories)));
}

function drawTiles(shown, summary, isAll) {
  const scores = shown.map((r) => r.verifier).filter((score) => score !== null);
  const lost = shown.filter((r) => !r.trainable).length, all = summary.overall;
  const calls = sum(shown.flatMap((r) => Object.values(r.calls))), ok = sum(shown.map((r) => r.calls.ok || 0));
  const error = isAll && all.standard_error !== null ? "± " + fixed(all.standard_error) + ", " : "";
  const tile = (name, value, note) => h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "value" }, value), h("div", { class: "note" }, note));
  replace(byId("tiles"),
    tile("Mean score", scores.length ? fixed(sum(scores) / scores.length) : "–", error + scores.length + " scored"),
    tile("Solved", scores.length ? percent(shown.filter((r) => r.solved).length / scores.length) : "–", "full verifier score"),
    tile("Lost, not scored", String(lost), isAll ? "worth " + fixed(all.losses.points, 1) + " points" : "not in the mean"),
    tile("Calls that ran well", calls ? percent(ok / calls) : "–", counted(calls, "call")),
    tile("Sampled tokens", whole(sum(shown.map((r) => r.tokens))), counted(sum(shown.map((r) => r.turns)), "turn")),
    tile("Time in rollouts", seconds(sum(shown.map((r) => r.time[4]))), shown.length ? seconds(sum(shown.map((r) => r.time[4])) / shown.length) + " each" : ""));
}
