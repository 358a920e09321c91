"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const night = matchMedia("(prefers-color-scheme: dark)");
  // A finger scrolls the page; it does not zoom a plot.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const config = {responsive: true, displayModeBar: false};

  // The figure with the page's colours in the place of their names.
  function coloured(value, colours) {
    if (typeof value === "string") {
      return value[0] === "$" ? colours.getPropertyValue("--" + value.slice(1)).trim() || value : value;
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, colours)]));
  }

  function draw(key) {
    const select = document.querySelector(`select[data-plot="${key}"]`);
    const [, figure] = report.plots[key][select ? select.selectedIndex : 0];
    const colours = getComputedStyle(document.documentElement);
    const {data, layout} = coloured({...figure, layout: {...figure.layout, template: report.template}}, colours);
    // Numbers in cells need the width of a page; a finger gets them one by one.
    const isNarrow = document.getElementById(`plot-${key}`).clientWidth < 480;
    for (const trace of data) {
      if (trace.type === "heatmap" && isNarrow) trace.texttemplate = "";
    }
    return Plotly.react(`plot-${key}`, data, {dragmode, ...layout}, config);
  }

  function drawAll() {
    return Promise.all(Object.keys(report.plots).map(draw));
  }

  for (const select of document.querySelectorAll("select[data-plot]")) {
    select.addEventListener("change", () => draw(select.dataset.plot));
  }
  night.addEventListener("change", drawAll);
  drawAll().then((drawn) => { document.documentElement.dataset.drawn = drawn.length; });
})();
