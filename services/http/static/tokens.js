// Shows how the two models split the finished text: their tokens around one place, one row above the other.

import { call } from "./stream.js";

const $ = (id) => document.getElementById(id);
const encoder = new TextEncoder();
const HINT = $("tokens-hint").textContent;
const SPLITTING = "Splitting the text…";
const REACH = 22; // bytes to show on either side of the place
const VISIBLE = { " ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥" };
let newest = null; // the signal of the newest call of `load`
let pointed = null; // the last event of a pointer over the text
let shown = null; // { bytes, rows: [{ model, ends }], place } of the text on the page

export function clear(hint = HINT) {
  shown = null;
  $("tokens").replaceChildren();
  $("tokens-spoken").textContent = "";
  $("tokens-hint").textContent = hint;
  mark(0, 0);
}

// Asks for the tokens of the text that is on the page now.
export async function load(text, models, signal) {
  clear(SPLITTING);
  newest = signal;
  try {
    const answer = await (await call("/v1/segmentations", { text, models }, signal)).json();
    const bytes = encoder.encode(text);
    const rows = answer.data.map(({ model, tokens }) => {
      let end = 0;
      return { model, ends: tokens.map((token) => (end += token.byte_count)) };
    });
    const counts = rows.map(({ model, ends }) => `${model}: ${ends.length} tokens`).join(", ");
    if (rows.some(({ ends }) => (ends.at(-1) ?? 0) !== bytes.length)) {
      clear(`${counts}. A tokenizer here changes the text that it reads, so the rows cannot be aligned.`);
      return;
    }
    shown = { bytes, rows, place: -1 };
    $("tokens-hint").textContent = `${counts}. ${HINT}`;
    if (pointed && $("text").matches(":hover")) show(byteUnder(pointed)); // it rested there meanwhile
  } catch (error) {
    if (error.status === 401) throw error; // the page asks for a key
    if (!signal.aborted) clear(`The text could not be split: ${error.message}`);
    else if ($("tokens-hint").textContent === SPLITTING && newest === signal) clear();
  }
}

// Shows the tokens around a byte of the text, and marks the first model's token there.
function show(place) {
  if (!shown || place < 0 || place >= shown.bytes.length) return;
  const { bytes, rows } = shown;
  const spans = rows.map(({ ends }) => ends.map((end, index) => [ends[index - 1] ?? 0, end]));
  const here = spans.map((tokens) => tokens.findIndex(([, end]) => end > place));
  if (shown.here?.join() === here.join()) return;
  Object.assign(shown, { place, here });
  // Whole tokens of both rows: from the first to the last byte within reach at which tokens of both begin and end.
  const near = spans.map((tokens) => tokens.filter(([start, end]) => end > place - REACH && start <= place + REACH));
  const shared = (side) =>
    near[0].map((one) => one[side]).filter((edge) => near.every((row) => row.some((one) => one[side] === edge)));
  const from = shared(0).find((edge) => edge <= place) ?? Math.min(...near.map((one) => one[0][0]));
  const to = shared(1).findLast((edge) => edge > place) ?? Math.max(...near.map((one) => one.at(-1)[1]));
  const within = near.map((one) => one.filter(([start, end]) => start >= from && end <= to));
  const places = [...new Set([from, to, ...within.flat(2)])].sort((one, other) => one - other);
  const column = (offset) => places.indexOf(offset) + 2;
  const cells = rows.flatMap(({ model }, row) => {
    const name = cell(model, "model", row, 1, 2);
    name.title = model;
    const tokens = within[row].map(([start, end]) => {
      const index = spans[row].findIndex((one) => one[0] === start && one[1] === end);
      const kind = `token ${index % 2 ? "odd" : "even"}${index === here[row] ? " here" : ""}`;
      return cell(visible(bytes.slice(start, end)), kind, row, column(start), column(end));
    });
    return [name, ...tokens];
  });
  const grid = $("tokens");
  grid.style.gridTemplateColumns = `auto repeat(${places.length - 1}, auto) 1fr`;
  grid.replaceChildren(...cells);
  const [middle, scroller] = [cells.find((one) => one.classList.contains("here")), grid.parentElement];
  scroller.scrollLeft = middle.offsetLeft + middle.offsetWidth / 2 - scroller.clientWidth / 2;
  mark(...spans[0][here[0]]);
}

// Tells screen readers the tokens of both models at the place, and who proposed its first byte.
function speak() {
  const { bytes, rows, here, place } = shown;
  if (!here) return; // the text is empty
  const tokens = rows.map(({ model, ends }, row) => {
    const index = here[row];
    return `${model}: ${visible(bytes.slice(ends[index - 1] ?? 0, ends[index]))}`;
  });
  const [node] = positionOf(place);
  $("tokens-spoken").textContent = [...tokens, `proposed by: ${node.parentElement.title}`].join("; ");
}

function cell(text, kind, row, from, to) {
  const made = document.createElement("span");
  made.textContent = text;
  made.className = kind;
  made.style.gridArea = `${row + 1} / ${from} / ${row + 2} / ${to}`;
  return made;
}

// Returns bytes as text with visible white space, and those of an incomplete character in hex.
function visible(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    return [...text].map((one) => VISIBLE[one] ?? one).join("");
  } catch {
    return [...bytes].map((byte) => `‹${byte.toString(16).padStart(2, "0")}›`).join("");
  }
}

// Marks the bytes from `start` to `end` of the text on the page, where the browser can.
function mark(start, end) {
  if (!globalThis.CSS?.highlights) return;
  CSS.highlights.delete("token");
  if (start >= end) return;
  const range = new Range();
  range.setStart(...positionOf(start));
  range.setEnd(...positionOf(end));
  CSS.highlights.set("token", new Highlight(range));
}

function* textNodes() {
  const walker = document.createTreeWalker($("text"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) yield walker.currentNode;
}

// Returns the text node and the place in it of a byte; of the character's start if the byte is inside one.
function positionOf(byte) {
  let [left, last] = [byte, [$("text"), 0]];
  for (const node of textNodes()) {
    let units = 0;
    for (const character of node.data) {
      if (left <= 0) return [node, units];
      left -= encoder.encode(character).length;
      if (left < 0) return [node, units];
      units += character.length;
    }
    last = [node, units];
  }
  return last;
}

function byteAt(node, units) {
  let bytes = 0;
  for (const one of textNodes()) {
    if (one === node) return bytes + encoder.encode(one.data.slice(0, units)).length;
    bytes += encoder.encode(one.data).length;
  }
  return -1;
}

// Returns the byte of the text under the pointer, -1 if there is none.
function byteUnder({ clientX, clientY }) {
  const position = document.caretPositionFromPoint?.(clientX, clientY);
  const range = position ? null : document.caretRangeFromPoint?.(clientX, clientY);
  const node = position?.offsetNode ?? range?.startContainer;
  let units = position?.offset ?? range?.startOffset ?? 0;
  if (node?.nodeType !== Node.TEXT_NODE || !$("text").contains(node)) return -1;
  // The position is that of the nearest edge, which is the character's right one in its second half.
  const character = new Range();
  character.setStart(node, Math.min(units, node.length));
  character.setEnd(node, Math.min(units + 1, node.length));
  const box = character.getBoundingClientRect();
  if (units > 0 && (units === node.length || clientX < box.left)) units -= 1;
  if (/[\udc00-\udfff]/.test(node.data[units] ?? "")) units -= 1;
  return byteAt(node, units);
}

$("text").addEventListener("pointermove", (event) => show(byteUnder((pointed = event))));
$("text").addEventListener("pointerdown", (event) => show(byteUnder(event)));
$("text").addEventListener("keydown", (event) => {
  if (!shown || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.preventDefault();
  const { ends } = shown.rows[0];
  const now = shown.place < 0 ? -1 : ends.findIndex((end) => end > shown.place);
  const next = Math.min(Math.max(now + (event.key === "ArrowRight" ? 1 : -1), 0), ends.length - 1);
  show(ends[next - 1] ?? 0);
  speak();
});
