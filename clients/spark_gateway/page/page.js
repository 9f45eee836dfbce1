// Shows the status document as it changes, and talks to the model. Nothing is loaded from anywhere else.

const PERIOD_MS = 1000;
const HISTORY = 120;
const FADE = 0.75;
const $ = (id) => document.getElementById(id);
// Of the legend, whose colours the browser has chosen for dark or light.
const color = (name) => getComputedStyle(document.querySelector(`.swatch.${name}`)).backgroundColor;

let before = null;
let glow = [];
const history = {};

// ---- asking ----

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { "x-api-key": key } : {}) };
}

async function look() {
  try {
    const answer = await fetch("/status", { headers: headers() });
    $("key").hidden = answer.status !== 401;
    if (!answer.ok) {
      const said = await answer.json();
      throw new Error(said.error.message);
    }
    show(await answer.json());
  } catch (error) {
    say("bad", `unreachable: ${error.message}`);
    if (before !== null) note("the daemon does not answer");
    before = null;
  }
  setTimeout(look, PERIOD_MS);
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", event.target.elements[0].value);
});

// ---- figures ----

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count.toFixed(unit && count < 100 ? 1 : 0)} ${units[unit]}`;
};
const share = (part, all) => (all > 0 ? part / all : null);
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);

function hitRate(status) {
  const now = status.residency.uses?.decode, then = before?.residency.uses?.decode;
  if (!now || !now.uses) return null;
  const uses = now.uses - (then?.uses ?? 0), misses = now.misses - (then?.misses ?? 0);
  return uses > 0 ? 1 - misses / uses : null;
}

function figures(status) {
  const seconds = before === null ? null : status.uptime_s - before.uptime_s;
  const made = before === null ? 0 : status.requests.output_tokens - before.requests.output_tokens;
  const speed = seconds > 0 ? made / seconds : 0;
  const residency = status.residency;
  return [
    ["tokens a second", speed.toFixed(1), speed],
    ["hit rate", percent(hitRate(status)), hitRate(status) ?? (history["hit rate"]?.at(-1) ?? 0)],
    ["running", status.requests.running, status.requests.running],
    ["waiting", status.requests.queued, status.requests.queued],
    ["experts in memory", percent(share(residency.resident, residency.records)), share(residency.resident, residency.records)],
    ["output tokens", status.requests.output_tokens.toLocaleString("en"), null],
  ];
}

function showFigures(status) {
  for (const [name, text, value] of figures(status)) {
    let box = document.querySelector(`#figures [data-name="${name}"]`);
    if (!box) {
      box = document.createElement("div");
      box.dataset.name = name;
      box.append(document.createElement("b"), document.createElement("span"), document.createElement("canvas"));
      box.children[1].textContent = name;
      $("figures").append(box);
    }
    box.children[0].textContent = text;
    if (value === null) { box.children[2].hidden = true; continue; }
    const line = (history[name] ??= []);
    line.push(value);
    if (line.length > HISTORY) line.shift();
    spark(box.children[2], line);
  }
}

function spark(canvas, line) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d"), most = Math.max(...line, 1e-9);
  pen.scale(ratio, ratio);
  pen.strokeStyle = color("ring");
  pen.lineWidth = 1.5;
  pen.beginPath();
  line.forEach((value, at) => pen.lineTo((at / (HISTORY - 1)) * width, height - 2 - (value / most) * (height - 4)));
  pen.stroke();
}

// ---- experts ----

function used(status) {
  // What live traffic used since the last look: the difference of two counts.
  const now = status.calibration?.decode?.counts, then = before?.calibration?.decode?.counts;
  if (!now) return [];
  return now.map((row, layer) => row.map((count, expert) => (then?.[layer] ? count - then[layer][expert] : 0)));
}

function showMap(status) {
  const layers = status.residency.layers;
  if (!layers.length) return;
  const columns = Math.max(...layers.map((layer) => layer.records));
  const fresh = used(status);
  glow = layers.map((layer, y) => Array.from({ length: layer.records }, (_, x) =>
    fresh[y]?.[x] > 0 ? 1 : (glow[y]?.[x] ?? 0) * FADE));
  const canvas = $("map"), ratio = devicePixelRatio || 1;
  const size = Math.min(14, (canvas.parentElement.clientWidth - 32) / columns);
  const tall = Math.max(3, Math.min(14, Math.max(size, 420 / layers.length > 14 ? 14 : 420 / layers.length)));
  canvas.style.width = `${size * columns}px`;
  canvas.style.height = `${tall * layers.length}px`;
  canvas.width = size * columns * ratio;
  canvas.height = tall * layers.length * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const shades = { h: color("hot"), r: color("ring"), ".": color("disk") };
  const gap = size > 4 ? 1 : 0;
  layers.forEach((layer, y) => {
    for (let x = 0; x < layer.records; x += 1) {
      const tier = layer.experts?.[x] ?? (x < layer.resident ? "r" : ".");
      pen.globalAlpha = 1;
      pen.fillStyle = shades[tier];
      pen.fillRect(x * size, y * tall, size - gap, tall - gap);
      if (glow[y][x] > 0.05) {
        pen.globalAlpha = glow[y][x] * 0.85;
        pen.fillStyle = color("used");
        pen.fillRect(x * size, y * tall, size - gap, tall - gap);
      }
    }
  });
  canvas.dataset.cells = String(layers.reduce((sum, layer) => sum + layer.records, 0));
  canvas.onmousemove = (event) => {
    const x = Math.floor(event.offsetX / size), y = Math.floor(event.offsetY / tall);
    const layer = layers[y];
    if (!layer || x >= layer.records) return;
    const count = status.calibration?.decode?.counts?.[y]?.[x];
    const names = { h: "hot", r: "in memory", ".": "on disk" };
    const uses = count === undefined ? "" : `, used ${count.toLocaleString("en")} times`;
    $("pointed").textContent = `layer ${y}, expert ${x}: ${names[layer.experts?.[x]] ?? ""}${uses}`;
  };
}

// ---- the rest ----

function showMemory(status) {
  const memory = status.memory;
  const rows = [
    ["experts in host memory", share(status.residency.resident, status.residency.records), memory.records_bytes],
    ["core (every token uses it)", 1, memory.core_bytes],
    ["locked", share(memory.locked_bytes, memory.arena_bytes), memory.locked_bytes],
    ["huge pages", share(memory.huge_bytes, memory.arena_bytes), memory.huge_bytes],
    ["state of running requests", share(memory.state_used_bytes, memory.state_bytes), memory.state_used_bytes],
  ];
  $("memory").replaceChildren(...rows.map(([name, part, size]) => {
    const label = document.createElement("label"), bar = document.createElement("i"), told = document.createElement("span");
    told.textContent = `${bytes(size)}, ${percent(part)}`;
    bar.style.setProperty("--share", `${100 * (part ?? 0)}%`);
    label.append(told, name, bar);
    return label;
  }));
}

function showProcesses(status) {
  const rows = [["process", "state", "restarts", "memory"]];
  for (const one of status.processes) rows.push([one.role, one.state, one.restarts, bytes(one.rss_bytes)]);
  $("processes").replaceChildren(...rows.map((cells, number) => {
    const row = document.createElement("tr");
    for (const text of cells) {
      const cell = document.createElement(number ? "td" : "th");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  }));
}

function note(text) {
  const line = document.createElement("li"), when = document.createElement("time");
  when.textContent = new Date().toTimeString().slice(0, 8);
  line.append(when, text);
  $("events").prepend(line);
  while ($("events").children.length > 200) $("events").lastChild.remove();
}

function events(status) {
  if (before === null) return note(`connected: ${status.model.name} is ${status.state}`);
  if (before.pid !== status.pid) note("another daemon answers");
  if (before.state !== status.state) note(`${status.state}${status.reason ? `: ${status.reason}` : ""}`);
  const restarts = Object.fromEntries(before.processes.map((one) => [one.role, one.restarts]));
  for (const one of status.processes) {
    if (one.restarts > (restarts[one.role] ?? 0)) note(`the ${one.role} was started again: ${one.reason || "no reason told"}`);
  }
  for (const [name, word] of [["finished", "finished"], ["refused", "were refused"], ["failed", "failed"], ["cancelled", "were cancelled"]]) {
    const count = status.requests[name] - before.requests[name];
    if (count > 0) note(`${count} request${count > 1 ? "s" : ""} ${count > 1 ? word : word.replace("were", "was")}`);
  }
  const moved = status.residency.placement?.version;
  if (moved !== before.residency.placement?.version) note(`placement ${moved} was taken`);
}

function say(kind, text) {
  $("state").className = kind;
  $("state").textContent = text;
}

function show(status) {
  const loading = status.loading.total_bytes ? ` ${percent(share(status.loading.done_bytes, status.loading.total_bytes))}` : "";
  const more = status.state === "loading" ? loading : status.reason ? `: ${status.reason}` : "";
  say(status.state === "ready" ? "ready" : "bad", `${status.state}${more}`);
  $("model").textContent = `${status.model.name}, ${status.model.architecture}, ${status.model.context} positions`;
  events(status);
  showFigures(status);
  showMap(status);
  showMemory(status);
  showProcesses(status);
  before = status;
}

// ---- chat ----

const talk = [];

function paragraph(kind) {
  const made = document.createElement("p");
  made.className = kind;
  $("talk").append(made);
  return made;
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n");
    held = parts.pop();
    yield* parts;
  }
}

async function answer() {
  const body = { model: before?.model.name ?? "", messages: talk, stream: true };
  const got = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body) });
  if (!got.ok) throw new Error((await got.json()).error.message);
  let thought = null, text = null;
  for await (const line of lines(got.body)) {
    if (!line.startsWith("data: {")) continue;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.reasoning_content) (thought ??= paragraph("thought")).textContent += delta.reasoning_content;
    if (delta.content) (text ??= paragraph("assistant")).textContent += delta.content;
    $("talk").scrollTop = $("talk").scrollHeight;
  }
  talk.push({ role: "assistant", content: text?.textContent ?? "" });
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [box, button] = event.target.elements;
  const said = box.value.trim();
  if (!said) return;
  talk.push({ role: "user", content: said });
  paragraph("user").textContent = said;
  box.value = "";
  button.disabled = true;
  try {
    await answer();
  } catch (error) {
    talk.pop();
    paragraph("error").textContent = error.message;
  }
  button.disabled = false;
});
$("ask").elements[0].addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});

$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.body).backgroundColor === "rgb(22, 23, 26)";
  document.documentElement.style.colorScheme = dark ? "light" : "dark";
});

look();
