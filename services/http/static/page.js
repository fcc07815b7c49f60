// The page: sends a request, shows the stream as it arrives, and compares runs. Text is only ever set as textContent.

const $ = (id) => document.getElementById(id);
const encoder = new TextEncoder();
const NAMES = { "": "target", draft: "draft model", suffix: "repeated text" };
let running = null; // the AbortController of the request in progress
let compared = { key: "", runs: [] };

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

function options(select, names) {
  const chosen = select.value;
  for (const name of names) {
    const option = element("option", name);
    option.value = name;
    select.append(option);
  }
  select.value = chosen || select.options[0]?.value || "";
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

// Yields the JSON values of a stream of server-sent events. Throws if the stream reports an error or breaks off.
async function* events(response) {
  const decoder = new TextDecoder();
  let held = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    held += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // comments keep the connection alive
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    if (done) throw new Error("the stream ended before the text did");
  }
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
      draftbridge: { mode, draft: mode === "off" ? "" : $("draft").value, spans: true },
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
const milliseconds = (nanoseconds) => `${(nanoseconds / 1e6).toFixed(nanoseconds < 1e8 ? 1 : 0)} ms`;
const accepted = (one) => (one.num_draft_tokens ? `${one.num_accepted_tokens} of ${one.num_draft_tokens}` : "–");

function showStatistics(values) {
  $("statistics").replaceChildren(
    ...values.map(([name, value]) => {
      const group = element("div");
      group.append(element("dt", name), element("dd", value));
      return group;
    }),
  );
}

function showProgress(characters, started) {
  const seconds = (performance.now() - started) / 1000;
  showStatistics([
    ["Characters so far", String(characters)],
    ["Characters per second", seconds > 0 ? perSecond(characters / seconds) : "–"],
  ]);
}

function showFinal(statistics, usage, bytes) {
  showStatistics([
    ["Tokens per second, measured", perSecond(statistics.measured_tokens_per_second)],
    ["Predicted", perSecond(statistics.predicted_tokens_per_second)],
    ["Candidates accepted", accepted(statistics)],
    ...statistics.sources.map((one) => [`by ${NAMES[one.name] ?? one.name}`, accepted(one)]),
    ["Tokens", `${usage.completion_tokens} in ${statistics.target_pass_count} passes`],
    ["Bytes", String(bytes)],
    ["First text after", milliseconds(statistics.first_token_ns)],
    ["Passes of the target", milliseconds(statistics.verify_ns)],
    ["Network and queues", milliseconds(statistics.network_ns)],
    ["Draft", statistics.draft || "none"],
  ]);
  $("plan").textContent = [statistics.plan_summary, statistics.note].filter(Boolean).join(". ");
}

function record(key, mode, text, statistics, bytes) {
  if (compared.key !== key) compared = { key, runs: [] };
  const first = compared.runs[0];
  compared.runs.push(bytes);
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
  $("statistics").replaceChildren();
  $("plan").textContent = "";
  $("status").textContent = "Generating…";
  $("stop").disabled = false;
  const counts = {};
  let [text, started, statistics, usage] = ["", 0, null, null];
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      const choice = event.choices[0];
      const piece = choice?.text ?? choice?.delta?.content ?? "";
      if (piece) {
        started ||= performance.now();
        text += piece;
        append(piece, choice.draftbridge?.spans ?? [], counts);
        showLegend(counts);
        showProgress(text.length, started);
        $("text").scrollTop = $("text").scrollHeight;
      }
      if (event.usage) [usage, statistics] = [event.usage, event.usage.draftbridge[0]];
    }
    const bytes = encoder.encode(text);
    showFinal(statistics, usage, bytes.length);
    const verdict = record(key, mode, text, statistics, bytes);
    const seconds = ((performance.now() - started) / 1000).toFixed(2);
    $("status").textContent = `Finished: ${usage.completion_tokens} tokens in ${seconds} s; ${verdict}.`;
    return true;
  } catch (error) {
    const stopped = controller.signal.aborted;
    if (!stopped) showError(error.message);
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

showLegend({});
try {
  const response = await fetch("/v1/models");
  if (!response.ok) throw new Error(await failure(response));
  const models = await response.json();
  options($("model"), models.data.map((model) => model.id));
  options($("draft"), models.draftbridge.drafts.map((draft) => draft.id));
  const describe = () => {
    const model = models.data.find((one) => one.id === $("model").value);
    if (model?.draftbridge.chat_template) $("kind").value = "chat";
  };
  $("model").addEventListener("change", describe);
  describe();
} catch (error) {
  showError(error.message);
}
