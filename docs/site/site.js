// What scrolls can be reached by keyboard, panels take the colours that the reader chose, and the other language opens
// at the same heading: both have as many.
addEventListener("load", () => {
  const body = document.body;
  const follow = () => {
    if (body.dataset.theme === "auto") body.removeAttribute("data-jp-theme-light");
    else body.setAttribute("data-jp-theme-light", body.dataset.theme === "light");
  };
  follow();
  new MutationObserver(follow).observe(body, { attributeFilter: ["data-theme"] });
  const reach = () => document.querySelectorAll("pre, .picture, .table-wrapper, .math, article p:has(> img)").forEach((one) => {
    if (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight) one.tabIndex = 0;
  });
  reach();
  addEventListener("resize", reach);
  addEventListener("toggle", reach, true);
  const headings = [...document.querySelectorAll("article h1, article h2, article h3")];
  document.querySelectorAll("a[hreflang]").forEach((link) => link.addEventListener("click", () => {
    link.hash = `at-${headings.filter((one) => one.getBoundingClientRect().top < innerHeight / 3).length}`;
  }));
  const at = location.hash.match(/^#at-(\d+)$/);
  if (at && at[1] > 1) headings[Math.min(at[1], headings.length) - 1].scrollIntoView();
});
