// What scrolls can be reached by keyboard, and panels take the colours that the reader chose.
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
});
