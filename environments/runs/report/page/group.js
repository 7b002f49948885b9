// The members of a group side by side: scores, advantages, where they part, and what each left behind.

const DIFF_LINES = 400;

const linesOf = (text) => (text === undefined ? [] : text.split("\n").slice(0, DIFF_LINES));

/** Lines of two texts, either of which may not be there, as [kind, line]; by the longest common subsequence, of long texts only where they differ at first. */
function diffLines(left, right) {
  const a = linesOf(left), b = linesOf(right);
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) for (let j = b.length - 1; j >= 0; j -= 1) best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const lines = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { lines.push(["same", a[i]]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) { lines.push(["gone", a[i]]); i += 1; }
    else { lines.push(["add", b[j]]); j += 1; }
  }
  return lines;
}

const SIGNS = { same: "  ", gone: "- ", add: "+ " };
function renderDiff(left, right) {
  return h("div", { class: "diff" }, diffLines(left, right).map(([kind, line]) => h("span", { class: kind }, SIGNS[kind] + line)));
}

/** What an entry says, in one text: two members are alike as long as these are. */
function entryText(entry) {
  return [entry.role, entry.reasoning || "", entry.text, ...entry.calls.flatMap((call) => [call.name, call.arguments || "", call.result || ""])].join("\n");
}

function firstDifference(left, right) {
  const most = Math.max(left.length, right.length);
  for (let place = 0; place < most; place += 1) {
    if (!left[place] || !right[place] || entryText(left[place]) !== entryText(right[place])) return place;
  }
  return -1;
}

/** "solved at turn 2, then destroyed", where the environment gave a score after each turn. */
function turnStory(rollout) {
  const scores = rollout.turn_scores || [], solved = scores.findIndex((score) => score >= 1);
  if (solved === -1) return null;
  const after = scores.findIndex((score, place) => place > solved && score < 1);
  if (after === -1 && rollout.solved) return "solved at turn " + (solved + 1);
  return "solved at turn " + (solved + 1) + ", then destroyed" + (after === -1 ? "" : " at turn " + (after + 1));
}

function saidAt(entry) {
  if (!entry) return "(ended before)";
  const calls = entry.calls.map((call) => call.name + " " + call.arguments + (call.result ? "\n→ " + call.result : ""));
  return [entry.reasoning, entry.text, ...calls].filter(Boolean).join("\n") || "(" + entry.role + ")";
}

function renderMember(rollout, detail, first, parting, onOpen) {
  const story = turnStory(rollout), components = detail.components.map(([name, value]) => name + " " + plain(value));
  const entry = detail.entries[parting];
  const where = first === null ? null : parting === -1 ? "the same as the first" : "parts at " + (entry?.turn ? "turn " + entry.turn.turn : "message " + (parting + 1));
  return h("section", { class: "member", "aria-label": "Rollout " + rollout.id },
    h("h3", {}, h("button", { class: "more", type: "button", onclick: () => onOpen(rollout) }, rollout.id)),
    h("div", { class: "chips" }, scoreChip(rollout), advantageChip(rollout), chip(rollout.outcome, outcomeKind(rollout)), chip(counted(rollout.turns, "turn"))),
    story && h("div", { class: "story" }, story),
    rollout.turn_scores?.length > 0 && h("div", { class: "meta" }, "after each turn: " + rollout.turn_scores.map(plain).join(", ")),
    h("div", { class: "meta" }, components.join(" · ") || "no reward"),
    where && h("div", { class: "meta" }, where),
    parting >= 0 && h("div", { class: "said", tabindex: "0" }, saidAt(entry)));
}

/** The text of a file in an end state; files have any name, `constructor` too. */
const leftAt = (detail, path) => (Object.hasOwn(detail.end_state, path) ? detail.end_state[path] : undefined);

/** Files of the end states that are not the same everywhere, each against the first member that has the best score. */
function renderFiles(members, details) {
  const best = members.reduce((at, r, place) => ((r.verifier ?? -1) > (members[at].verifier ?? -1) ? place : at), 0);
  const paths = [...new Set(details.flatMap((detail) => Object.keys(detail.end_state)))].sort();
  if (!paths.length) return h("p", { class: "meta" }, "No end states are stored: set env.store_end_state to compare what the members left.");
  const changed = paths.filter((path) => new Set(details.map((detail) => leftAt(detail, path))).size > 1);
  if (!changed.length) return h("p", { class: "meta" }, "All members left the same: " + counted(paths.length, "file") + ".");
  return h("div", { class: "files" }, h("p", { class: "meta" }, changed.length + " of " + counted(paths.length, "file") + (changed.length === 1 ? " differs, and" : " differ, and each") + " is shown against " + members[best].id + ", which has the best score."),
    changed.map((path) => [h("h3", {}, path), details.map((detail, place) => {
      if (place === best || leftAt(detail, path) === leftAt(details[best], path)) return null;
      return [h("div", { class: "meta" }, members[place].id + (leftAt(detail, path) === undefined ? ": not there" : "")), renderDiff(leftAt(details[best], path), leftAt(detail, path))];
    })]));
}

function renderGroup(group, members, details, onOpen, onBack) {
  const first = details[0], partings = details.map((detail, place) => (place ? firstDifference(first.entries, detail.entries) : -1));
  const parts = partings.filter((place) => place >= 0), earliest = parts.length ? Math.min(...parts) : -1;
  const scores = members.map((r) => r.score).filter((score) => score !== null);
  const signal = new Set(scores).size > 1;
  replace(byId("detail"),
    h("button", { class: "quiet up", type: "button", onclick: onBack }, "Back"),
    h("h2", {}, "Group " + group),
    h("p", { class: "meta" }, members.length + " rollouts of " + members[0].item + "; rewards " + scores.map(plain).join(", ") + "; " + (signal ? "advantages are " + data.baseline : "no signal: all rewards are the same") + "."),
    h("div", { class: "members", tabindex: "0", role: "group", "aria-label": "Members" },
      members.map((r, place) => renderMember(r, details[place], place ? first : null, place ? partings[place] : earliest, onOpen))),
    h("h3", {}, "What they left in the workspace"), renderFiles(members, details));
}
