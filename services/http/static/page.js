// The page: sends a request, shows the stream as it arrives, and compares runs. Text is only ever set as textContent.

import { call, events, useKey } from "./stream.js";
import * as tokens from "./tokens.js";

const $ = (id) => document.getElementById(id);
const encoder = new TextEncoder();
const NAMES = { "": "target", draft: "draft model", suffix: "repeated text", learned: "earlier outputs" };
let running = null; // the AbortController of the request in progress
let compared = { key: "", runs: [], alone: 0 }; // `alone`: measured tokens per second of the target without candidates
let models = [];
let drafts = [];

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function styleOf(source) {
  return source === "" ? "piece" : `piece from-${source in NAMES ? source : "other"}`;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

// Shows why a request failed, and asks for a key if the server wants one.
function showFailure(error) {
  if (error.status === 401) $("key-field").hidden = false;
  showError(error.message);
}

// Lists the names, after the choices that the page itself has, in place of those of an earlier call.
function options(select, names) {
  const chosen = select.value;
  for (const old of select.querySelectorAll("[data-listed]")) old.remove();
  for (const name of names) {
    const option = element("option", name);
    option.value = name;
    option.dataset.listed = "";
    select.append(option);
  }
  const known = [...select.options].some((one) => one.value === chosen);
  select.value = known && chosen ? chosen : (select.options[0]?.value ?? "");
}

function describe() {
  const model = models.find((one) => one.id === $("model").value);
  if (model?.draftbridge.chat_template) $("kind").value = "chat";
}

function request(mode) {
  const chat = $("kind").value === "chat";
  const input = chat ? { messages: [{ role: "user", content: $("prompt").value }] } : { prompt: $("prompt").value };
  const shared = {
    ...input,
    model: $("model").value,
    max_tokens: $("max_tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    seed: $("seed").valueAsNumber,
  };
  return {
    path: chat ? "/v1/chat/completions" : "/v1/completions",
    key: JSON.stringify(shared),
    body: {
      ...shared,
      stream: true,
      stream_options: { include_usage: true },
      draftbridge: { mode, draft: mode === "off" ? "" : $("draft").value, spans: true, progress: true },
    },
  };
}

// Appends text in pieces, each in the style of the source that proposed its first byte. Adds up the bytes by source.
function append(text, spans, counts) {
  const ends = [];
  let end = 0;
  for (const { source, byte_count } of spans) {
    end += byte_count;
    ends.push([end, source]);
    counts[source] = (counts[source] ?? 0) + byte_count;
  }
  const runs = [];
  let [offset, place] = [0, 0];
  for (const character of text) {
    while (place < ends.length - 1 && offset >= ends[place][0]) place += 1;
    const source = ends[place]?.[1] ?? "";
    if (runs.at(-1)?.source === source) runs.at(-1).text += character;
    else runs.push({ source, text: character });
    offset += encoder.encode(character).length;
  }
  for (const { source, text } of runs) {
    let last = $("text").lastElementChild;
    if (last?.dataset.source !== source) {
      last = element("span", "", styleOf(source));
      last.dataset.source = source;
      last.title = NAMES[source] ?? source;
      $("text").append(last);
    }
    last.append(text);
  }
}

function showLegend(counts) {
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const items = Object.keys({ "": 0, draft: 0, suffix: 0, ...counts }).map((source) => {
    const share = total ? ` ${Math.round((100 * (counts[source] ?? 0)) / total)}% (${counts[source] ?? 0} bytes)` : "";
    const item = element("li");
    item.append(element("span", NAMES[source] ?? source, styleOf(source)), share);
    item.dataset.source = source;
    item.dataset.bytes = counts[source] ?? 0;
    return item;
  });
  $("legend").replaceChildren(...items);
}

const perSecond = (value) => (value > 0 ? value.toFixed(value < 100 ? 1 : 0) : "–");
const milliseconds = (nanoseconds) => `${(nanoseconds / 1e6).toFixed(nanoseconds < 1e7 ? 1 : 0)} ms`;
const accepted = (one) =>
  one.num_draft_tokens
    ? `${one.num_accepted_tokens} of ${one.num_draft_tokens} (${Math.round((100 * one.num_accepted_tokens) / one.num_draft_tokens)}%)`
    : "–";

// Says which draft the bridge chose by itself, and why.
function choice(made) {
  if (!made) return "";
  const other = made.second_best || "the target alone";
  const [best, next] = [made.bytes_per_second, made.second_best_bytes_per_second].map((one) => one.toFixed(0));
  return `draft ${made.draft}, ${made.explores ? "tried to learn its speed" : "the fastest"}: expected ${best} bytes/s, ${other} ${next}`;
}

function cell(name, value, hint = "") {
  const group = element("div");
  group.append(element("dt", name), element("dd", value));
  if (hint) group.append(element("dd", hint, "hint"));
  return group;
}

// Shows the statistics so far, or at the end. The first pass, which reads the prompt, is not part of the speeds.
function showStrip(statistics, mode) {
  const [measured, predicted] = [statistics.measured_tokens_per_second, statistics.plain_tokens_per_second];
  const alone = mode === "off" ? measured : compared.alone || predicted;
  const kind = mode === "off" ? "this run" : compared.alone ? "measured" : "predicted";
  const passes = statistics.target_pass_count;
  const sources = statistics.sources.filter((one) => one.num_draft_tokens);
  $("strip").replaceChildren(
    cell("Tokens per second", perSecond(measured), `predicted ${perSecond(statistics.predicted_tokens_per_second)}`),
    cell("Target alone", perSecond(alone), measured > 0 && alone > 0 ? `${kind}; this is ${(measured / alone).toFixed(2)}x` : kind),
    cell("Accepted", accepted(statistics), sources.map((one) => `${NAMES[one.name] ?? one.name} ${accepted(one)}`).join("; ")),
    cell("Plan", statistics.current_plan || "–", `${passes} passes of the target`),
    cell("Verifying", passes ? `${milliseconds(statistics.verify_ns / passes)} a pass` : "–", `${milliseconds(statistics.verify_ns)} in all`),
    cell(
      "Network and queues",
      passes > 1 ? `${milliseconds(statistics.network_ns / (passes - 1))} a pass` : "–",
      `waited for the draft: ${milliseconds(statistics.waited_ns)}`,
    ),
  );
  $("plan").textContent = [statistics.plan_summary, choice(statistics.draft_choice), statistics.note]
    .filter(Boolean)
    .join(". ");
}

function record(mode, statistics, bytes) {
  const first = compared.runs[0];
  compared.runs.push(bytes);
  if (mode === "off") compared.alone = statistics.measured_tokens_per_second;
  const parted = first ? bytes.findIndex((byte, place) => byte !== first[place]) : -1;
  const same = !first || (parted < 0 && bytes.length === first.length);
  const verdict = !first ? "first run" : same ? "identical" : `differs at byte ${parted < 0 ? bytes.length : parted}`;
  if (compared.runs.length === 1) $("runs").replaceChildren();
  const row = element("tr");
  const cells = [
    mode,
    statistics.draft || "none",
    perSecond(statistics.measured_tokens_per_second),
    perSecond(statistics.predicted_tokens_per_second),
    accepted(statistics),
    String(bytes.length),
  ];
  row.append(...cells.map((text) => element("td", text)), element("td", verdict, same ? "" : "differs"));
  $("runs").append(row);
  return verdict;
}

async function run(mode) {
  running?.abort();
  const controller = (running = new AbortController());
  const { path, key, body } = request(mode);
  showError("");
  $("text").replaceChildren();
  tokens.clear();
  $("strip").replaceChildren();
  $("plan").textContent = "";
  if (compared.key !== key) compared = { key, runs: [], alone: 0 };
  $("status").textContent = "Generating…";
  $("stop").disabled = false;
  const counts = {};
  let [text, started, statistics, usage] = ["", 0, null, null];
  try {
    const response = await call(path, body, controller.signal);
    for await (const event of events(response)) {
      const choice = event.choices[0];
      const piece = choice?.text ?? choice?.delta?.content ?? "";
      if (piece) {
        started ||= performance.now();
        text += piece;
        append(piece, choice.draftbridge?.spans ?? [], counts);
        showLegend(counts);
        $("text").scrollTop = $("text").scrollHeight;
      }
      if (choice?.draftbridge?.progress) showStrip(choice.draftbridge.progress, mode);
      if (event.usage) [usage, statistics] = [event.usage, event.usage.draftbridge[0]];
    }
    const bytes = encoder.encode(text);
    const verdict = record(mode, statistics, bytes);
    showStrip(statistics, mode);
    const seconds = ((performance.now() - (started || performance.now())) / 1000).toFixed(2);
    const first = milliseconds(statistics.first_token_ns);
    $("status").textContent =
      `Finished: ${usage.completion_tokens} tokens, ${bytes.length} bytes, in ${seconds} s, the first after ${first}; ${verdict}.`;
    const draft = statistics.draft || $("draft").value || drafts[0];
    await tokens.load(text, draft ? [body.model, draft] : [body.model], controller.signal);
    return !controller.signal.aborted;
  } catch (error) {
    if (running !== controller) return false; // a newer run owns the page
    const stopped = controller.signal.aborted;
    if (!stopped) showFailure(error);
    $("status").textContent = stopped ? "Stopped." : "Failed.";
    return false;
  } finally {
    if (running === controller) {
      running = null;
      $("stop").disabled = true;
    }
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run($("mode").value);
});
$("compare").addEventListener("click", async () => {
  if (!$("form").reportValidity()) return;
  const mode = $("mode").value === "off" ? "auto" : $("mode").value;
  if (await run("off")) await run(mode);
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});

async function start() {
  showError("");
  try {
    const listed = await (await call("/v1/models")).json();
    const isFirst = !models.length;
    models = listed.data;
    drafts = listed.draftbridge.drafts.map((draft) => draft.id);
    options($("model"), models.map((model) => model.id));
    options($("draft"), drafts);
    if (isFirst) describe();
    $("key-field").hidden = true;
  } catch (error) {
    showFailure(error);
  }
}

$("model").addEventListener("change", describe);
$("key").addEventListener("change", () => {
  useKey($("key").value.trim());
  start();
});
showLegend({});
await start();
