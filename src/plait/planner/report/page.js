"use strict";
// Draws the page's figures in its own colours, and sorts its tables. Everything is here: nothing is fetched.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const narrow = matchMedia("(max-width: 640px)");
  const shown = {};
  const FONT = "system-ui, sans-serif";

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function axis(given) {
    const lines = { gridcolor: color("--grid"), linecolor: color("--grid"), zerolinecolor: color("--grid") };
    return { ...lines, automargin: true, ...given };
  }

  function layoutOf(figure) {
    const given = figure.layout;
    const label = { bgcolor: color("--card"), bordercolor: color("--muted"), font: { color: color("--ink"), family: FONT, size: narrow.matches ? 11 : 13 } };
    return {
      ...given,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), family: FONT, size: narrow.matches ? 11 : 13 },
      hoverlabel: { ...label, align: "left" },
      xaxis: axis(given.xaxis),
      yaxis: axis(given.yaxis),
      // A finger that moves over a chart moves the page.
      dragmode: touch.matches ? false : given.dragmode,
    };
  }

  function draw(name, view) {
    const figure = figures[name][view];
    shown[name] = view;
    const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
    return Plotly.react(name, figure.data, layoutOf(figure), config);
  }

  function zoom(what) {
    const { meta, xaxis } = figures.timeline[shown.timeline].layout;
    const whole = xaxis.range;
    const [from, to] = document.getElementById("timeline").layout.xaxis.range.map(Number);
    const width = to - from;
    const middle = (from + to) / 2;
    const ranges = {
      whole,
      ...meta,
      in: [middle - width / 4, middle + width / 4],
      out: [middle - width, middle + width],
      left: [from - width / 2, to - width / 2],
      right: [from + width / 2, to + width / 2],
    };
    let [low, high] = ranges[what];
    const shift = Math.max(0, whole[0] - low) - Math.max(0, high - whole[1]);
    if (high - low < whole[1] - whole[0]) [low, high] = [low + shift, high + shift];
    else [low, high] = whole;
    Plotly.relayout("timeline", { "xaxis.range": [low, high] });
  }

  function press(group, chosen) {
    for (const button of group) button.setAttribute("aria-pressed", String(button === chosen));
  }

  function sort(table, column) {
    const heads = [...table.tHead.rows[0].cells];
    const order = heads[column].getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const head of heads) head.setAttribute("aria-sort", "none");
    heads[column].setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const keyOf = (row) => row.cells[column].dataset.sort;
    const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
    const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(keyOf(a), keyOf(b)));
    table.tBodies[0].append(...rows);
  }

  function show(section, rank, words) {
    section.classList.toggle("choosing", rank !== null);
    for (const part of section.querySelectorAll(".part")) {
      part.classList.toggle("chosen", rank !== null && part.dataset.ranks.split(" ").includes(rank));
    }
    section.querySelector(".owner").textContent = words;
  }

  function listen() {
    for (const button of document.querySelectorAll("[data-view]")) {
      button.addEventListener("click", () => {
        press(button.parentElement.children, button);
        draw(button.dataset.chart, button.dataset.view);
      });
    }
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoom(button.dataset.zoom));
    }
    for (const table of document.querySelectorAll("table.sortable")) {
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        head.querySelector("button").addEventListener("click", () => sort(table, column));
      });
    }
    const section = document.getElementById("ownership-section");
    const ranks = section.querySelectorAll(".rank");
    for (const button of ranks) {
      button.addEventListener("click", () => {
        const isChosen = button.getAttribute("aria-pressed") === "true";
        press(ranks, isChosen ? null : button);
        show(section, isChosen ? null : button.dataset.rank, isChosen ? "" : `What tp rank ${button.dataset.rank} holds.`);
      });
    }
    section.addEventListener("click", (event) => {
      const part = event.target.closest(".part");
      if (part) section.querySelector(".owner").textContent = part.dataset.words;
    });
  }

  function drawAll() {
    return Promise.all(Object.keys(figures).map((name) => draw(name, shown[name] ?? Object.keys(figures[name])[0])));
  }

  listen();
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll().then(() => document.documentElement.setAttribute("data-drawn", "yes"));
})();
