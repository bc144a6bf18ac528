// Controls around the package's panels. All numbers come from worker.js, where Python runs; what is shown first is stored.
const stored = await fetch("first.json.packed");
const first = await new Response(stored.body.pipeThrough(new DecompressionStream("gzip"))).json();
const main = document.getElementById("main"), state = document.getElementById("state");
const worker = new Worker(new URL(`worker.js?lang=${document.documentElement.lang}`, import.meta.url), { type: "module" });
const waiting = new Map();
let number = 0, isReady = false;
// the page's own words, in its language: {0} is the first of the values
const told = (text, ...values) => (first.words[text] ?? text).replace(/\{(\d)\}/g, (_, at) => values[at]);

function ask(request) {
  return new Promise((resolve) => {
    waiting.set(++number, resolve);
    worker.postMessage({ number, request });
  });
}

worker.onmessage = ({ data }) => {
  if (data.number) {
    document.body.dataset.tookMs = data.took_ms.toFixed(1);
    waiting.get(data.number)(data);
    waiting.delete(data.number);
  } else if (data.warm) {
    document.body.dataset.warm = performance.now().toFixed(0);
  } else if (data.ready) {
    isReady = true;
    document.body.dataset.ready = performance.now().toFixed(0);
    state.textContent = told("Python is here: every number below is worked out anew.");
    show();
  } else {
    state.textContent = told("Python did not start ({0}). The stored pictures stand; serve the folder with any web server.", data.failed);
  }
};
worker.onerror = (event) => { state.textContent = told("Python did not start ({0}). The stored pictures stand; serve the folder with any web server.", event.message ?? "worker"); };

function make(tag, fields = {}, ...children) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
}

// ---- the address: #zero?dp=64&gpu=h200
function place() {
  const [name, words] = location.hash.slice(1).split("?");
  const known = name === "claims" || name in first.panels;
  return { name: known ? name : "planner", words: Object.fromEntries(new URLSearchParams(known ? words : "")) };
}

function remember(name, words) {
  const asked = new URLSearchParams(words).toString();
  history.replaceState(null, "", `#${name}${asked ? `?${asked}` : ""}`);
}

// ---- controls
function controlOf(spec, value, changed) {
  const id = `control-${spec.name}`;
  if (spec.kind === "strip") return strip(spec, value, changed);
  if (spec.kind === "text") return typed(spec, value, changed, id);
  if (spec.kind === "grid") return grid(spec, value, changed, id);
  const index = Math.max(0, spec.options.findIndex(([, word]) => word === value));
  if (spec.kind === "slider") {
    const out = make("output", { textContent: spec.options[index][0] });
    const input = make("input", { id, type: "range", min: 0, max: spec.options.length - 1, value: index });
    const tell = () => {
      out.textContent = spec.options[input.value][0];
      input.setAttribute("aria-valuetext", out.textContent);
    };
    input.oninput = () => { tell(); changed(spec.name, spec.options[input.value][1]); };
    tell();
    out.htmlFor = id;
    return make("div", { className: "control slider" }, make("label", { htmlFor: id, textContent: spec.label }), input, out);
  }
  const input = make("select", { id }, ...spec.options.map(([label, word]) => make("option", { value: word, textContent: label })));
  input.selectedIndex = index;
  input.onchange = () => changed(spec.name, input.value);
  return make("div", { className: "control" }, make("label", { htmlFor: id, textContent: spec.label }), input);
}

function strip(spec, value, changed) {
  const switches = spec.options.map(([label], at) => {
    const button = make("button", { type: "button", textContent: label });
    button.setAttribute("aria-pressed", value[at] === "1");
    button.onclick = () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      changed(spec.name, switches.map((one) => (one.getAttribute("aria-pressed") === "true" ? "1" : "0")).join(""));
    };
    return button;
  });
  return group(spec, switches);
}

function group(spec, children) {
  const row = make("div", { className: "row" }, ...children);
  row.setAttribute("role", "group");
  row.setAttribute("aria-label", spec.label);
  return make("div", { className: "control wide" }, make("span", { textContent: spec.label }), row);
}

function typed(spec, value, changed, id) {
  const input = make("input", { id, type: "text", value });
  input.setAttribute("list", `${id}-examples`);
  input.onchange = () => changed(spec.name, input.value);
  const examples = make("datalist", { id: `${id}-examples` }, ...spec.options.map(([, word]) => make("option", { value: word })));
  return make("div", { className: "control" }, make("label", { htmlFor: id, textContent: spec.label }), input, examples);
}

// Cells to press, a row for each line of the text; Python says what a press does, and the text can be typed too.
function grid(spec, value, changed, id) {
  const options = make("select", { id }, ...spec.options.map(([label, word]) => make("option", { value: word, textContent: label })));
  const text = make("textarea", { value, rows: spec.cells.length, spellcheck: false });
  text.setAttribute("aria-label", told("the chart as text"));
  const table = make("div", { className: "grid" });
  const put = (cells) => table.replaceChildren(...cells.map((row, r) => {
    let color = "";
    const buttons = row.map((word, c) => {
      color = word === "-" ? color : spec.colors[word[0]] ?? "";
      const button = make("button", { type: "button", textContent: word });
      button.setAttribute("aria-label", `rank ${r}, column ${c}: ${word === "." ? "free" : word}`);
      if (color) Object.assign(button.style, { background: color, color: "#000" });
      button.onclick = async () => {
        const found = await ask({ do: "place", panel: place().name, control: spec.name, value: text.value, row: r, column: c, option: options.value });
        if (found.refused_because) return;
        text.value = found.value;
        put(found.cells);
        table.children[r].children[c + 1].focus();
        changed(spec.name, found.value);
      };
      return button;
    });
    return make("div", {}, make("span", { textContent: r }), ...buttons);
  }));
  const readText = async () => {
    const found = await ask({ do: "cells", panel: place().name, control: spec.name, value: text.value });
    if (!found.refused_because) put(found.cells);
  };
  text.onchange = async () => { await readText(); changed(spec.name, text.value); };
  put(spec.cells);
  if (value !== spec.start) readText();
  return make("div", { className: "control wide" }, make("label", { htmlFor: id, textContent: spec.label }), make("div", {}, options, table, text));
}

// ---- a panel
let latest = 0;

function open(name, words) {
  const panel = first.panels[name], chosen = { ...words };
  const said = make("p", { className: "said", textContent: panel.said });
  said.setAttribute("aria-live", "polite");
  const picture = make("div", { className: "picture", innerHTML: panel.svg, tabIndex: 0 });
  picture.setAttribute("role", "group");
  picture.setAttribute("aria-label", "picture");
  const result = make("div");
  const form = make("form");
  form.onsubmit = (event) => event.preventDefault();

  const fill = () => form.replaceChildren(
    ...(Object.keys(panel.presets).length ? [presets()] : []),
    ...panel.controls.map((spec) => controlOf(spec, chosen[spec.name] ?? spec.start, changed)),
  );
  const presets = () => {
    const menu = make("select", { id: "presets" }, make("option", { textContent: told("your own"), value: "" }),
      ...Object.keys(panel.presets).map((one) => make("option", { textContent: told(one), value: one })));
    menu.onchange = () => {
      if (!menu.value) return;
      Object.assign(chosen, panel.presets[menu.value]);
      const picked = menu.value;
      fill();
      document.getElementById("presets").value = picked;
      remember(name, chosen);
      update();
    };
    return make("div", { className: "control" }, make("label", { htmlFor: "presets", textContent: told("start from") }), menu);
  };
  const changed = (control, word) => {
    chosen[control] = word;
    remember(name, chosen);
    update();
  };
  const put = (found) => {
    said.textContent = found.refused_because ?? found.said;
    picture.innerHTML = found.svg ?? "";
    picture.classList.remove("waits");
    if (name === "pipeline") play(picture, result);
  };
  const update = async () => {
    const turn = ++latest;
    picture.classList.toggle("waits", !isReady);
    const found = await ask({ do: "show", panel: name, words: chosen });
    if (turn !== latest) return; // something newer was asked meanwhile
    put(found);
    document.body.dataset.shown = `${name}:${turn}`;
  };
  const buttons = panel.buttons.map((button) => {
    const press = make("button", { type: "button", textContent: told(button) });
    press.onclick = () => busy(press, async () => put(await ask({ do: "press", panel: name, button, words: chosen })));
    return press;
  });
  const share = make("button", { type: "button", textContent: told("copy a link to this") });
  share.onclick = async () => {
    await navigator.clipboard.writeText(location.href);
    share.textContent = told("copied");
  };
  fill();
  main.replaceChildren(
    make("h2", { textContent: panel.title }), make("p", { className: "basis", textContent: panel.basis }), form,
    make("div", { className: "row" }, ...buttons, ...(name === "planner" ? planner(chosen, put, result, form) : []), share),
    said, picture, result,
    make("p", { className: "basis", textContent: told("Lesson: notebooks/{0}.ipynb", panel.lesson) }),
  );
  if (name === "pipeline") play(picture, result);
  document.title = `${panel.title} · ${told("Training on many GPUs")}`;
  if (isReady) update();
}

async function busy(button, work) {
  const label = button.textContent, begun = performance.now();
  button.disabled = true;
  const tick = setInterval(() => { button.textContent = `${label}: ${((performance.now() - begun) / 1000).toFixed(0)} s`; }, 500);
  await work();
  clearInterval(tick);
  Object.assign(button, { textContent: label, disabled: false });
}

// ---- the planner: a file of a model, a search, files to take away
function planner(chosen, put, result, form) {
  let file = "", text = "";
  const nothing = told("or drop a config.json of transformers here");
  const note = make("span", { textContent: nothing });
  form.addEventListener("input", ({ target }) => {
    if (!file) return;
    if (target.id === "control-model") {
      [file, text, choose.value] = ["", "", ""];
      note.textContent = nothing;
    } else note.textContent = told("press Plan for {0}; the picture is of the model above", file);
  });
  const choose = make("input", { type: "file", accept: ".json" });
  choose.setAttribute("aria-label", told("a config.json of transformers"));
  const take = async (one) => {
    if (!one) return;
    [file, text] = [one.name, await one.text()];
    note.textContent = told("{0}: its shape is used in place of the model above", file);
  };
  choose.onchange = () => take(choose.files[0]);
  const drop = make("div", { className: "drop row" }, choose, note);
  drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
  drop.ondragleave = () => drop.classList.remove("over");
  drop.ondrop = (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    take(event.dataTransfer.files[0]);
  };
  const press = make("button", { type: "button", textContent: told("Plan") });
  press.onclick = () => busy(press, async () => {
    if (file) note.textContent = told("{0}: its shape is used in place of the model above", file);
    const found = await ask({ do: "plan", words: chosen, file, text });
    put(found);
    document.body.dataset.planned = found.refused_because ? "refused" : "done";
    if (found.refused_because) return result.replaceChildren();
    const files = Object.entries(found.files).map(([name, content]) => {
      const link = make("a", { textContent: name, download: name });
      link.href = URL.createObjectURL(new Blob([content], { type: "text/plain" }));
      return make("li", {}, link);
    });
    const refused = Object.entries(found.refused).map(([name, why]) => make("li", { textContent: `no ${name}: ${why}` }));
    const lines = make("pre", { textContent: found.lines.join("\n"), tabIndex: 0 });
    lines.setAttribute("role", "group");
    lines.setAttribute("aria-label", told("layouts and why"));
    result.replaceChildren(lines, make("h3", { textContent: told("Files") }), make("ul", {}, ...files, ...refused));
  });
  return [press, drop];
}

// ---- a schedule in motion: what has begun by a moment
function play(picture, result) {
  const svg = picture.querySelector("svg");
  const lanes = svg ? [...svg.querySelectorAll("rect.faint")] : [];
  if (!lanes.length) return result.replaceChildren();
  const box = (one) => one.getBBox();
  const bottom = Math.max(...lanes.map((one) => box(one).y + box(one).height));
  const left = box(lanes[0]).x, width = box(lanes[0]).width;
  const parts = [...svg.querySelectorAll('rect:not(.faint):not(.ground), text[pointer-events="none"]')]
    .map((one) => ({ one, at: box(one) })).filter(({ at }) => at.y < bottom && at.x >= left - 1);
  const slider = make("input", { type: "range", min: 0, max: 1000, value: 1000, id: "moment" });
  const label = make("label", { htmlFor: "moment", textContent: told("moment") });
  const set = (share) => {
    slider.value = 1000 * share;
    for (const { one, at } of parts) one.style.visibility = at.x < left + share * width ? "" : "hidden";
  };
  slider.oninput = () => set(slider.value / 1000);
  const button = make("button", { type: "button", textContent: told("play") });
  button.onclick = () => {
    const begun = performance.now(), takes_ms = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 6000;
    const step = () => {
      const share = takes_ms ? Math.min(1, (performance.now() - begun) / takes_ms) : 1;
      set(share);
      if (share < 1 && slider.isConnected) requestAnimationFrame(step);
    };
    step();
  };
  result.replaceChildren(make("div", { className: "control slider" }, label, slider, button));
}

// ---- claims
const verdicts = { right: told("Right"), "right-if": told("Right if"), wrong: told("Wrong"), ambiguous: told("It depends: right if") };

function openClaims(words) {
  const search = make("input", { type: "text", id: "word", value: words.word ?? "" });
  const topic = make("select", { id: "topic" }, make("option", { value: "", textContent: told("all") }),
    ...Object.entries(first.topics).map(([key, name]) => make("option", { value: key, textContent: name })));
  topic.value = words.topic ?? "";
  const count = make("p", { className: "said" }), list = make("div");
  count.setAttribute("aria-live", "polite");
  const update = () => {
    const word = search.value.toLowerCase();
    const found = first.claims.filter((one) => (!topic.value || one.topic === topic.value)
      && `${one.id} ${one.claim} ${one.answer} ${one.say} ${one.condition}`.toLowerCase().includes(word));
    remember("claims", Object.fromEntries(Object.entries({ word: search.value, topic: topic.value }).filter(([, one]) => one)));
    count.textContent = told("{0} of {1} claims", found.length, first.claims.length);
    list.replaceChildren(...found.map(claimOf));
  };
  search.oninput = topic.onchange = update;
  const control = (name, input) => make("div", { className: "control" }, make("label", { htmlFor: input.id, textContent: name }), input);
  main.replaceChildren(
    make("h2", { textContent: told("What is said, and what comes out") }),
    make("form", { onsubmit: (event) => event.preventDefault() }, control(told("has the words"), search), control(told("topic"), topic)),
    count, list,
  );
  document.title = `${told("Claims, with a search")} · ${told("Training on many GPUs")}`;
  update();
}

function claimOf(one) {
  const again = make("button", { type: "button", textContent: told("compute it here") });
  const out = make("span");
  again.onclick = () => busy(again, async () => {
    const found = await ask({ do: "claim", id: one.id });
    out.textContent = ` ${found.answer}. ${JSON.stringify(found.values)}`;
  });
  const verdict = `${verdicts[one.verdict]} ${one.condition}`.trim();
  return make("section", { className: "claim" },
    make("h3", { textContent: `${one.id} “${one.claim}”` }),
    make("p", {}, make("strong", { textContent: `${verdict}. ` }), told("Comes out: {0}. {1}", one.answer, one.say)),
    make("p", { className: "basis", textContent: told("Source: {0}", one.source) }), again, out);
}

// ---- the whole
function show() {
  const { name, words } = place();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (name === "claims") openClaims(words);
  else open(name, words);
}

document.getElementById("panels").append(
  ...Object.entries(first.panels).map(([name, panel]) => make("li", {}, make("a", { href: `#${name}`, textContent: panel.title }))),
  make("li", {}, make("a", { href: "#claims", textContent: told("Claims, with a search") })),
);
document.getElementById("about").textContent =
  told("course-lib {0}; Python is Pyodide. Every function that is used here is plain arithmetic of the package, as its notebooks call it.", first.version);
document.getElementById("other").onclick = ({ currentTarget }) => { currentTarget.hash = location.hash; };
addEventListener("hashchange", show);
show();
document.body.dataset.painted = performance.now().toFixed(0);
