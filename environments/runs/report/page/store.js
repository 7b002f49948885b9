// What the pages share: their data, the state in the address, and the theme.

const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function saveState() {
  const kept = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
  history.replaceState(null, "", "#" + kept.toString());
}

/** The value that Python packed: JSON in gzip in base64. */
async function unpack(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) bytes[place] = letters.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const chunks = new Map();
let starts = [];

function setChunks(sizes) {
  let before = 0;
  starts = sizes.map((size) => { const at = before; before += size; return at; });
}

function loadChunk(number) {
  if (!chunks.has(number)) {
    if (chunks.size > 12) chunks.delete(chunks.keys().next().value);
    chunks.set(number, unpack(byId("chunk-" + number).textContent));
  }
  return chunks.get(number);
}

/** The detail of a rollout, from the chunk that holds it. */
async function readDetail(number) {
  let low = 0, high = starts.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= number) low = middle;
    else high = middle - 1;
  }
  return (await loadChunk(low))[number - starts[low]];
}

function paintTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (theme) => { document.documentElement.dataset.theme = theme; };
  paint(state.theme || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!state.theme) paint(dark.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => { state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; paint(state.theme); saveState(); });
}
