// Small tools: elements from text only, numbers for people.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Children are nodes or text; text never becomes markup. */
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

// Control characters, and those that turn the direction of what follows: unseen, they make a text read as another.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

/** Text with these as ␛ or ‹U+202E›. */
function visible(text) {
  return text.replace(UNSEEN, (sign) => {
    const code = sign.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : code === 0x7f ? "\u2421" : "‹U+" + code.toString(16).toUpperCase().padStart(4, "0") + "›";
  });
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

/** `1 turn`, `2 turns`. */
function counted(number, word) {
  return whole(number) + " " + word + (number === 1 ? "" : "s");
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  if (text !== undefined) node.textContent = String(text);
  return node;
}

function replace(node, ...children) {
  node.replaceChildren();
  append(node, children);
}

const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const fixed = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const whole = (value) => Math.round(value).toLocaleString("en-US");

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return Math.round(value * 1000) + " ms";
  if (value < 99.5) return value.toFixed(1) + " s";
  return value < 5400 ? (value / 60).toFixed(1) + " min" : (value / 3600).toFixed(1) + " h";
}

/** Numbers of unknown kind: whole ones as they are, others with three digits. */
const plain = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : String(value));

function chip(text, kind = "") {
  return h("span", { class: ("chip " + kind).trim() }, text);
}
