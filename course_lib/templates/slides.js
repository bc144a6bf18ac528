const size = { width: 1280, height: 720, margin: 0.02, center: false };
Reveal.initialize({ ...size, hash: true, transition: "none", plugins: [RevealNotes] });
const signs = [{ left: "$$", right: "$$", display: true }, { left: "$", right: "$", display: false }];
renderMathInElement(document.querySelector(".slides"), { delimiters: signs, throwOnError: false });
document.body.dataset.ready = "";
