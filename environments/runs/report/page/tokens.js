// Tokens of a segment: what was given, what the template wrote, what was sampled, and what the update will push.

const TOKENS_AT_ONCE = 3000;
const COLOURINGS = { logprob: "logprob", entropy: "entropy", mask: "mask", advantage: "advantage", weights: "weights version" };
const LOGPROB_STEPS = [0.05, 0.2, 0.5, 1, 2, 4, 7];
const ENTROPY_STEPS = [0.02, 0.1, 0.3, 0.7, 1.2, 2, 3];
const ADVANTAGE_STEPS = [0.05, 0.5, 1.2];

/** Everything about one token; spans and logprobs are walked once for the whole segment. */
function readSegment(segment, number, rollout, detail) {
  const tokens = [], found = new Map(), pieces = detail.pieces || vocabularies[detail.vocabulary] || {};
  for (const [where, position, stored, again, beyond] of detail.differences || []) if (where === number) found.set(position, { stored, again, beyond });
  let span = 0, sampled = 0, stretch = 0;
  segment.ids.forEach((id, position) => {
    while (span < segment.spans.length - 1 && position >= segment.spans[span][0]) span += 1;
    while (stretch < segment.trained.length - 1 && position >= segment.trained[stretch]) stretch += 1;
    const [, kind, turn, weights] = segment.spans[span] || [0, "given", 0, ""];
    const trained = stretch % 2 === 1;
    const perTurn = rollout.turn_advantages || [];
    const advantage = trained && rollout.advantage !== undefined ? (perTurn.length ? perTurn[turn - 1] : rollout.advantage) : null;
    const place = kind === "sampled" ? sampled++ : -1;
    const logprob = place < 0 ? null : segment.logprobs[place], entropy = place < 0 || !segment.entropies ? null : segment.entropies[place];
    tokens.push({ id, pieces, position, kind, turn, weights, trained, advantage, logprob, entropy, difference: found.get(position) });
  });
  return tokens;
}

function pieceText(token) {
  const piece = token.pieces[token.id];
  if (piece === undefined) return "#" + token.id;
  return typeof piece === "string" ? piece : piece.map((byte) => "\\x" + byte.toString(16).toUpperCase().padStart(2, "0")).join("");
}

const step = (steps, value) => steps.filter((limit) => value > limit).length;

function tokenColour(token, by, versions) {
  if (by === "mask") return token.trained ? "t-trained" : "";
  if (by === "weights") return token.weights ? "t-w" + (versions.indexOf(token.weights) % 6) : "";
  if (by === "advantage") return token.advantage === null || Math.abs(token.advantage) <= ADVANTAGE_STEPS[0] ? "" : (token.advantage > 0 ? "t-up" : "t-down") + step(ADVANTAGE_STEPS, Math.abs(token.advantage));
  if (by === "entropy") return token.entropy === null ? "" : "t-p" + step(ENTROPY_STEPS, token.entropy);
  return token.logprob === null ? "" : "t-p" + step(LOGPROB_STEPS, -token.logprob);
}

function tokenWords(token) {
  const words = ["id " + token.id, JSON.stringify(pieceText(token)), "position " + token.position, token.kind === "glue" ? "template" : token.kind];
  words.push(token.logprob === null ? "no logprob" : "logprob " + token.logprob.toFixed(4) + " (" + percent(Math.exp(token.logprob)) + ")");
  if (token.kind === "sampled") words.push(token.entropy === null ? "entropy not known" : "entropy at least " + token.entropy.toFixed(3));
  words.push(token.trained ? "mask: trained" : "mask: -100, not trained");
  if (token.advantage !== null) words.push("advantage " + token.advantage.toFixed(3));
  if (token.weights) words.push("weights " + token.weights);
  if (token.difference) words.push("verify --against: the model says " + token.difference.again.toFixed(4) + " now, " + Math.abs(token.difference.again - token.difference.stored).toFixed(4) + (token.difference.beyond ? " apart: beyond the tolerance" : " apart: confirmed"));
  return words.join(" · ");
}

function legend(by, versions) {
  const key = (name, words) => h("span", {}, h("i", { class: "swatch key " + name }), words);
  if (by === "mask") return [key("t-trained", "trained"), key("", "masked")];
  if (by === "weights") return versions.map((version, place) => key("t-w" + (place % 6), "weights " + version));
  if (by === "advantage") return [key("t-down3", "pushed down"), key("", "no push"), key("t-up3", "pushed up")];
  if (by === "entropy") return [key("t-p0", "sure"), key("t-p4", "0.7 to 1.2 nats"), key("t-p7", "over 3 nats")];
  return [key("t-p0", "certain"), key("t-p3", "37 to 61 %"), key("t-p7", "under 0.1 %")];
}

/** Tokens as one block of text; the arrow keys go from one to the next, and its facts stand below. `reveal` goes to one. */
function tokenBlock(tokens, by, versions, words) {
  const facts = h("div", { class: "token-facts", role: "status" }, "Point at a token, or use the arrow keys.");
  const text = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": words });
  let at = -1, drawn = 0;
  const nodes = [];
  function choose(place) {
    if (place < 0 || place >= nodes.length) return;
    nodes[at]?.classList.remove("chosen");
    at = place;
    nodes[at].classList.add("chosen");
    facts.textContent = visible(tokenWords(tokens[at]));
  }
  function more() {
    const until = Math.min(tokens.length, drawn + TOKENS_AT_ONCE), part = document.createDocumentFragment();
    for (; drawn < until; drawn += 1) {
      const token = tokens[drawn], shown = pieceText(token);
      const node = h("span", { class: ("t k-" + token.kind + " " + tokenColour(token, by, versions) + (token.difference ? (token.difference.beyond ? " differs" : " confirmed") : "")).trim(), "data-at": drawn });
      node.textContent = visible(shown).replaceAll("\n", "⏎\n") || "∅";
      nodes.push(node);
      part.append(node);
    }
    text.append(part);
    rest.hidden = drawn >= tokens.length;
  }
  const rest = h("button", { class: "more", type: "button", onclick: more }, "Show more tokens");
  // Not mouseover, which also fires when the text scrolls below a pointer that rests.
  text.addEventListener("mousemove", (event) => { if (event.target.dataset.at) choose(Number(event.target.dataset.at)); });
  text.addEventListener("click", (event) => { if (event.target.dataset.at) choose(Number(event.target.dataset.at)); });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    choose(Math.max(0, Math.min(nodes.length - 1, at + by)));
    nodes[at].scrollIntoView({ block: "nearest" });
  });
  more();
  const block = h("div", { class: "token-block" }, text, rest, facts);
  block.reveal = (place) => {
    while (drawn < tokens.length && drawn <= place) more();
    choose(place);
    if (nodes[place]) text.scrollTop = nodes[place].offsetTop - text.clientHeight / 3;
  };
  return block;
}

/** Which weights sampled a rollout, in order of first use. */
function weightsOf(detail) {
  return [...new Set(detail.tokens.flatMap((segment) => segment.spans.map((span) => span[3])).filter(Boolean))];
}

function colourChoice(detail, current, onChange) {
  const versions = weightsOf(detail);
  const told = detail.tokens.some((segment) => segment.entropies);
  const options = Object.entries(COLOURINGS).filter(([name]) => (name !== "weights" || versions.length) && (name !== "entropy" || told));
  const select = h("select", { class: "colour", "aria-label": "Colour tokens by", onchange: () => onChange(select.value) },
    options.map(([name, words]) => h("option", { value: name, selected: name === current }, "by " + words)));
  return h("div", { class: "legend" }, select, legend(current, versions), h("span", {}, h("i", { class: "swatch key k-glue" }), "template"), h("span", {}, h("i", { class: "swatch key k-given" }), "given"));
}

/** The tokens of one turn: what was added before it, folded, and what it sampled. */
function turnTokens(rollout, detail, turn, by) {
  const versions = weightsOf(detail), parts = [];
  detail.tokens.forEach((segment, number) => {
    const own = readSegment(segment, number, rollout, detail).filter((token) => token.turn === turn);
    if (!own.length) return;
    const given = own.filter((token) => token.kind !== "sampled"), sampled = own.filter((token) => token.kind === "sampled");
    const before = h("details", { class: "before" }, h("summary", {}, whole(given.length) + " tokens before it: " + whole(given.filter((t) => t.kind === "glue").length) + " of the template"));
    before.addEventListener("toggle", () => { if (before.open && before.children.length === 1) before.append(tokenBlock(given, by, versions, "Tokens before turn " + turn)); });
    parts.push(number > 0 && given.length && segment.spans[0][2] === turn ? h("div", { class: "marker" }, "Segment " + (number + 1) + " begins here: the prompt was written anew") : null,
      given.length ? before : null, tokenBlock(sampled, by, versions, "Tokens that turn " + turn + " sampled"));
  });
  return parts;
}

/** The whole rollout as segments, from the first token of the prompt on. */
function allTokens(rollout, detail, by) {
  const versions = weightsOf(detail);
  return detail.tokens.map((segment, number) => {
    const tokens = readSegment(segment, number, rollout, detail);
    const words = "Segment " + (number + 1) + " of " + detail.tokens.length + ": " + whole(tokens.length) + " tokens, " + whole(tokens.filter((t) => t.trained).length) + " trained";
    const block = tokenBlock(tokens, by, versions, words), beyond = tokens.findIndex((token) => token.difference?.beyond);
    // A prompt can be pages long: what is looked for is where the model disagrees, or what was sampled. Places are known once it is drawn.
    requestAnimationFrame(() => block.reveal(beyond === -1 ? tokens.findIndex((token) => token.kind === "sampled") : beyond));
    return h("section", { class: "segment" }, h("h3", {}, words), block);
  });
}
