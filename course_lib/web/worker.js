// Python off the page's own thread, so that a search stops no slider. Files that end in .packed are unpacked here.
const types = { wasm: "application/wasm", mjs: "text/javascript", json: "application/json" };
const packed = ["pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip"];
const plainFetch = globalThis.fetch;

async function unpacked(url) {
  const found = await plainFetch(`${url}.packed`);
  if (!found.ok) throw new Error(`${url}.packed: ${found.status}`);
  const type = types[url.split(".").pop()];
  return new Response(found.body.pipeThrough(new DecompressionStream("gzip")), { headers: { "Content-Type": type } });
}

globalThis.fetch = (asked, options) => {
  const url = String(asked.url ?? asked);
  return packed.some((name) => url.endsWith(name)) ? unpacked(url) : plainFetch(asked, options);
};

async function start() {
  const folder = new URL("./pyodide/", self.location).href;
  const [code, { loadPyodide }, arithmetic] = await Promise.all([
    unpacked(`${folder}pyodide.asm.mjs`).then((one) => one.text()),
    import(`${folder}pyodide.mjs`),
    unpacked(new URL("./arithmetic.zip", self.location).href).then((one) => one.arrayBuffer()),
  ]);
  const module = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const createPyodideModule = (await import(module)).default;
  URL.revokeObjectURL(module);
  const python = await loadPyodide({ indexURL: folder, createPyodideModule });
  python.unpackArchive(arithmetic, "zip", { extractDir: "/course" });
  const lang = new URLSearchParams(self.location.search).get("lang");
  if (lang !== "en") {
    const words = await unpacked(new URL(`./${lang}/words.zip`, self.location).href);
    python.unpackArchive(await words.arrayBuffer(), "zip", { extractDir: "/course" });
  }
  return python.runPython(`
import os, sys, json
os.environ["COURSE_LANG"] = "${lang}"
sys.path.insert(0, "/course")
from course_lib.panels.asked import PANELS, answer
def say(text):
    return json.dumps(answer(json.loads(text)))
[say, list(PANELS)]
`);
}

// A panel's first answer takes ten times as long as its second: what checks its words is made then. So each is asked
// once while nobody asks; a turn of the loop lies between two, for whoever does.
function warm(say, panels) {
  if (!panels.length) return postMessage({ warm: true });
  say(JSON.stringify({ do: "show", panel: panels[0], words: {} }));
  setTimeout(warm, 0, say, panels.slice(1));
}

const ready = start();
ready.then(
  (python) => {
    const [say, panels] = [python.get(0), python.get(1).toJs()];
    postMessage({ ready: true });
    setTimeout(warm, 500, say, panels);
  },
  (error) => postMessage({ failed: String(error) }),
);
onmessage = async ({ data: { number, request } }) => {
  const say = (await ready).get(0), start_ms = performance.now();
  postMessage({ number, ...JSON.parse(say(JSON.stringify(request))), took_ms: performance.now() - start_ms });
};
