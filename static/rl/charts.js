// Line charts by uPlot over the server's drawings: values under the pointer or by arrow keys, one step on every chart
// of the page at once, a stretch of steps enlarged by dragging over it (a double click shows all again).
"use strict";
(() => {
  const charts = new Map(); // slug -> { plot, host, data, figure }
  const sync = uPlot.sync("steps");
  // a colour of the style sheet, of light or dark as the page is now: an element of that colour says which
  const probe = document.body.appendChild(document.createElement("i"));
  const color = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const whole = [1, 2, 5].map((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power)).flat().sort((a, b) => a - b);

  const exponent = (value) => value.toExponential().replace("e+", "e");
  // as the server writes numbers: three figures, no exponent where a plain number is short enough
  const text = (value) => {
    const size = Math.abs(value);
    if (size > 0 && size < 1e-3) return exponent(Number(value.toPrecision(2)));
    if (size >= 1000 && size < 1e7) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  };
  const ticks = (plot, values, axis, space, step) => {
    const largest = Math.max(...values.map(Math.abs));
    if (largest < 1e-3 || largest >= 1e7) return values.map((value) => (Math.abs(value) < step / 1000 ? "0" : exponent(Number(value.toPrecision(6)))));
    let decimals = 0;
    while (Math.abs(Number(step.toFixed(decimals)) - step) >= step / 1000) decimals += 1;
    return values.map((value) => (Math.abs(value) < step / 1000 ? "0" : value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })));
  };

  const columns = (data) => [data.steps, ...data.lines.map((line) => line.values)];
  const shape = (data) => JSON.stringify(data.lines.map((line) => [line.label, line.slot, line.held_out]));

  // The figures at a step; of a line that has none there the newest before it, with its step. Without a step: the last.
  const show = (chart, at) => {
    const { data, figure } = chart;
    const label = figure.querySelector(".chart-step");
    label.hidden = at === null;
    label.textContent = at === null ? "" : `step ${data.steps[at].toLocaleString("en")}`;
    const shown = [...figure.querySelectorAll(".chart-key strong")].map((strong, number) => {
      const values = data.lines[number].values;
      let place = at === null ? values.length - 1 : at;
      while (place > 0 && values[place] === null) place -= 1;
      const value = values[place];
      const earlier = at !== null && place !== at ? ` (step ${data.steps[place].toLocaleString("en")})` : "";
      strong.textContent = value === null ? "–" : text(value) + earlier;
      return `${data.lines[number].label} ${strong.textContent}`;
    });
    return `${label.textContent}: ${shown.join(", ")}`;
  };

  const enlarged = ({ plot, data }) => {
    const { min = null, max = null } = plot?.scales.x ?? {};
    return min !== null && max !== null && (min > data.steps[0] || max < data.steps.at(-1));
  };

  const options = (chart, width, height) => ({
    width,
    height,
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false }, sync: { key: sync.key, scales: ["x", null] } },
    // the whole run between the server's round values; an enlarged stretch by its own values
    scales: { x: { time: false }, y: { distr: chart.data.levels ? 3 : 1, range: (plot, low, high) => (enlarged(chart) && low !== null && !chart.data.levels ? uPlot.rangeNum(low, high, 0.1, true) : [chart.data.low, chart.data.high]) } },
    axes: [
      { stroke: () => color("--dim"), font: "12px Inter, system-ui, sans-serif", size: 34, space: 56, incrs: whole, values: ticks,
        grid: { show: false }, ticks: { stroke: () => color("--line"), size: 4 } },
      { stroke: () => color("--dim"), font: "12px Inter, system-ui, sans-serif", size: 58, space: 36, ...(chart.data.levels ? { splits: () => chart.data.levels, filter: (plot, splits) => splits, values: (plot, values) => values.map(text) } : { values: ticks }),
        grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } },
    ],
    series: [
      {},
      ...chart.data.lines.map((line) => ({
        label: line.label,
        stroke: () => color(`--line-${line.slot}`),
        width: 2,
        dash: line.held_out ? [5, 3] : undefined,
        spanGaps: true,
        points: { show: line.marked, size: 6, fill: () => color(`--line-${line.slot}`) },
      })),
    ],
    hooks: { setCursor: [(plot) => show(chart, plot.cursor.left >= 0 ? (plot.cursor.idx ?? null) : null)] },
  });

  const read = (chart, event) => {
    const last = chart.data.steps.length - 1;
    const at = chart.plot.cursor.left >= 0 ? (chart.plot.cursor.idx ?? -1) : -1;
    const places = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (!(event.key in places)) return;
    event.preventDefault();
    const place = Math.min(Math.max(places[event.key], 0), last);
    chart.plot.setCursor({ left: chart.plot.valToPos(chart.data.steps[place], "x"), top: 0 });
    chart.spoken.textContent = show(chart, place);
  };

  const draw = (figure, data) => {
    const place = figure.querySelector(".plot");
    const svg = place.querySelector("svg");
    const chart = { data, figure, host: document.createElement("div"), spoken: document.createElement("p") };
    const height = svg.clientHeight || Number(svg.getAttribute("height"));
    chart.host.id = `plot-${figure.dataset.chart}`;
    chart.host.tabIndex = 0;
    chart.host.setAttribute("role", "img");
    chart.host.setAttribute("aria-label", `${svg.getAttribute("aria-label")}. Left and right read the steps.`);
    chart.spoken.className = "hidden";
    chart.spoken.setAttribute("role", "status");
    place.classList.add("scripted");
    place.append(chart.host, chart.spoken);
    chart.plot = new uPlot(options(chart, place.clientWidth, height + 40), columns(data), chart.host);
    chart.host.addEventListener("keydown", (event) => read(chart, event));
    chart.host.addEventListener("blur", () => chart.plot.setCursor({ left: -10, top: -10 }));
    sizes.observe(place);
    charts.set(figure.dataset.chart, chart);
  };

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = charts.get(target.closest("[data-chart]")?.dataset.chart);
      if (chart && target.clientWidth && target.clientWidth !== chart.plot.width) chart.plot.setSize({ width: target.clientWidth, height: chart.plot.height });
    }
  });

  // Of a page that was asked for again the charts stay, with the new figures: pointer, enlarged stretch and focus too.
  const update = () => {
    const there = new Set();
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const slug = figure.dataset.chart;
      const data = JSON.parse(document.getElementById(`data-${slug}`).textContent);
      const chart = charts.get(slug);
      there.add(slug);
      if (!chart || shape(chart.data) !== shape(data)) {
        chart?.plot.destroy();
        draw(figure, data);
        continue;
      }
      if (chart.figure === figure) continue;
      const stretched = enlarged(chart);
      const focused = chart.focused;
      sizes.unobserve(chart.figure.querySelector(".plot"));
      Object.assign(chart, { figure, data, focused: false });
      const place = figure.querySelector(".plot");
      chart.host.setAttribute("aria-label", `${place.querySelector("svg").getAttribute("aria-label")}. Left and right read the steps.`);
      place.classList.add("scripted");
      place.append(chart.host, chart.spoken);
      sizes.observe(place);
      chart.plot.setData(columns(data), !stretched);
      if (stretched) chart.plot.redraw();
      show(chart, chart.plot.cursor.left >= 0 ? (chart.plot.cursor.idx ?? null) : null);
      if (focused) chart.host.focus({ preventScroll: true });
    }
    for (const [slug, chart] of charts) {
      if (there.has(slug)) continue;
      chart.plot.destroy();
      charts.delete(slug);
    }
  };

  update();
  document.addEventListener("live:leaving", () => {
    for (const chart of charts.values()) chart.focused = document.activeElement === chart.host;
  });
  document.addEventListener("live:updated", update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { plot } of charts.values()) plot.redraw();
  });
})();
