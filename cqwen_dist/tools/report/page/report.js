"use strict";
// Draws the page's data (#data) as SVG: curves over steps, and of each evaluation coverage, PIT and predictions.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const many = data.runs.length > 1;
  const hidden = new Set();
  let smooth = false;
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 4"];
  const colour = (i) => `var(--c${i % 6})`;

  // ------------------------------------------------------------------ small parts
  const make = (tag, attributes = {}, ...children) => {
    const svg = ["svg", "g", "path", "line", "rect", "circle", "text", "title"].includes(tag);
    const node = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const show = (v) => {
    if (v === null || v === undefined) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a >= 1e6 || a < 1e-3)) return v.toExponential(2).replace(/\.?0*e\+?/, "e");
    return a >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  };
  const percent = (v) => `${+(100 * v).toPrecision(4)} %`;

  // ticks of an axis at round values: linear, or powers of ten, with 2 and 5 between them if there is room
  const ticks = (low, high, count) => {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
    const out = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(+(k * step).toPrecision(12));
    return out;
  };
  const logTicks = (low, high) => {
    const a = Math.floor(Math.log10(low)), b = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((b - a) / 6));
    for (const [step, factors] of [[every, [1]], [1, [1]], [1, [1, 3]], [1, [1, 2, 5]]]) {
      const out = [];
      for (let p = a; p <= b; p++)
        for (const m of factors)
          if ((p - a) % step === 0 && m * 10 ** p >= low * 0.999 && m * 10 ** p <= high * 1.001) out.push(+(m * 10 ** p).toPrecision(3));
      if (out.length > 2) return out;
    }
    return ticks(low, high, 4);
  };
  const scale = (low, high, from, to, log) => {
    const f = log ? Math.log10 : (v) => v;
    const a = f(low), b = f(high);
    return (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
  };
  const frame = (width, height, title) => make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const axes = (svg, box, x, y, xs, ys, xFormat, yFormat, xTitle, yTitle) => {
    const middle = (box.top + box.bottom) / 2;
    svg.append(make("text", { class: "axis", x: (box.left + box.right) / 2, y: box.bottom + 30, "text-anchor": "middle" }, xTitle));
    svg.append(make("text", { class: "axis", x: 11, y: middle, transform: `rotate(-90 11 ${middle})`, "text-anchor": "middle" }, yTitle));
    for (const v of ys) {
      svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: y(v), y2: y(v) }));
      svg.append(make("text", { x: box.left - 6, y: y(v) + 3.5, "text-anchor": "end" }, yFormat(v)));
    }
    for (const v of xs) svg.append(make("text", { x: x(v), y: box.bottom + 15, "text-anchor": "middle" }, xFormat(v)));
  };
  const pathOf = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  const figure = (title, say) => {
    const node = make("figure", {}, make("figcaption", {}, title), make("div", { class: "say" }, say || ""));
    node.tip = make("div", { class: "tip" });
    node.tools = make("div", { class: "tools" });
    node.append(node.tools);
    return node;
  };
  const tipAt = (node, event, rows) => {
    node.tip.replaceChildren(...rows);
    node.tip.style.display = "block";
    const box = node.getBoundingClientRect(), wide = node.tip.offsetWidth;
    const x = event.clientX - box.left;
    node.tip.style.left = `${Math.max(4, x + 14 + wide > box.width ? x - wide - 14 : x + 14)}px`;
    node.tip.style.top = `${event.clientY - box.top + 10}px`;
  };
  // a link that saves rows() as CSV; made when it is used, so that the page does not hold its data twice
  const addCsv = (node, title, rows) => {
    const quoted = (v) => (/[",\n]/.test(v) ? `"${v.replaceAll('"', '""')}"` : v);
    const name = `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "data"}.csv`;
    const link = make("a", { class: "csv", href: "#", download: name, title: "Save what is drawn" }, "CSV");
    link.addEventListener("click", () => {
      const text = rows().map((row) => row.map((v) => quoted(String(v ?? ""))).join(",")).join("\n");
      link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(text + "\n")}`;
    });
    node.tools.append(link);
  };
  const legend = (...items) => make("div", { class: "legend" }, ...items.map((item) => make("span", {}, ...[item].flat())));
  // a button that switches state.log, whether the axis is logarithmic
  const addLogSwitch = (node, state, draw) => {
    const button = make("button", { type: "button", "aria-pressed": String(state.log) }, "Log");
    button.addEventListener("click", () => { state.log = !state.log; button.setAttribute("aria-pressed", String(state.log)); draw(); });
    node.tools.append(button);
  };
  const band = (upper, lower, fill) => make("path", { class: "band", d: `${pathOf([...upper, ...lower.reverse()])}Z`, fill });
  const smoothed = (ys) => {
    if (!smooth || ys.length < 12) return ys;
    const reach = Math.max(1, Math.round(ys.length / 40));
    return ys.map((_, i) => {
      const part = ys.slice(Math.max(0, i - reach), i + reach + 1);
      return part.reduce((a, b) => a + b, 0) / part.length;
    });
  };

  // ------------------------------------------------------------------ curves over steps
  const drawCurves = (node, chart) => {
    const lines = [];
    data.runs.forEach((run, r) => {
      if (hidden.has(r)) return;
      chart.series.forEach(([name, label], s) => {
        const curve = run.curves[name];
        if (curve) lines.push({ run, label, curve, colour: colour(many ? r : s), dash: many ? DASHES[s % 5] : /base|ridge/.test(name) ? "2 3" : DASHES[Math.floor(s / 6)] });
      });
    });
    const W = Math.max(300, node.clientWidth - 28 || 372), H = 232, box = { left: 62, right: W - 10, top: 20, bottom: H - 36 };
    const svg = frame(W, H, chart.title);
    const values = lines.flatMap((l) => (l.curve.y.length > 40 ? [...l.curve.y].sort((a, b) => a - b).slice(Math.floor(l.curve.y.length * 0.005), Math.ceil(l.curve.y.length * 0.995)) : l.curve.y));
    const log = chart.log && values.some((v) => v > 0);
    if (log) values.splice(0, values.length, ...values.filter((v) => v > 0));
    let low = Math.min(...values), high = Math.max(...values);
    for (const [v] of chart.at) if (v > low - (high - low) && v < high + (high - low) && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); }
    if (log) { if (high / low < 1.2) { low /= 1.1; high *= 1.1; } else { low /= 1.03; high *= 1.03; } }
    else { const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1; low = low >= 0 && low - pad < 0 ? 0 : low - pad; high += pad; if (chart.percent) high = Math.min(high, Math.max(1, low + 0.01)); }
    const last = Math.max(1, ...lines.map((l) => l.curve.x[l.curve.x.length - 1]));
    const x = scale(0, last, box.left, box.right), y = scale(low, high, box.bottom, box.top, log);
    const stages = data.runs.find((run, r) => !hidden.has(r))?.stages || [];
    stages.forEach((stage, i) => {
      if (i % 2) svg.append(make("rect", { class: "stage", x: x(stage.start), width: Math.max(0, x(Math.min(stage.stop, last)) - x(stage.start)), y: box.top, height: box.bottom - box.top }));
      if (stages.length > 1 && x(Math.min(stage.stop, last)) - x(stage.start) > 9 * stage.name.length * 0.62) svg.append(make("text", { x: x(stage.start) + 2, y: box.top - 7 }, stage.name));
    });
    axes(svg, box, x, y, ticks(0, last, 5), log ? logTicks(low, high) : ticks(low, high, 5), show, chart.percent ? percent : show, "Optimizer step", chart.unit);
    for (const [v, label] of chart.at)
      if (v >= low && v <= high) svg.append(make("line", { class: "at", x1: box.left, x2: box.right, y1: y(v), y2: y(v) }, make("title", {}, label)));
    const clip = (v) => Math.min(box.bottom, Math.max(box.top, v));
    for (const l of lines) {
      const c = l.curve;
      if (c.low) {
        const drawn = c.x.map((v, i) => i).filter((i) => !log || c.low[i] > 0);
        const edge = (ys) => drawn.map((i) => [x(c.x[i]), clip(y(ys[i]))]);
        if (drawn.length) svg.append(band(edge(c.high), edge(c.low), l.colour));
      }
      const ys = smoothed(c.y);
      const points = c.x.map((v, i) => [x(v), log && ys[i] <= 0 ? NaN : clip(y(ys[i]))]).filter((p) => Number.isFinite(p[1]));
      if (points.length === 1) svg.append(make("circle", { cx: points[0][0], cy: points[0][1], r: 3, fill: l.colour }));
      svg.append(make("path", { class: "line", d: pathOf(points), style: `stroke:${l.colour};stroke-dasharray:${l.dash || "none"}` }));
    }
    data.runs.forEach((run, r) => hidden.has(r) || run.alarms.forEach((a) => svg.append(make("line", { class: "alarm", x1: x(a.step), x2: x(a.step), y1: box.top, y2: box.bottom }, make("title", {}, `alarm: ${a.kind}`)))));
    const cross = make("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("pointermove", (event) => {
      const at = svg.getBoundingClientRect();
      const step = ((((event.clientX - at.left) / at.width) * W - box.left) / (box.right - box.left)) * last;
      if (step < -last * 0.02 || step > last * 1.02 || !lines.length) return;
      let nearest = null;
      for (const l of lines) for (const v of l.curve.x) if (nearest === null || Math.abs(v - step) < Math.abs(nearest - step)) nearest = v;
      cross.setAttribute("x1", x(nearest)); cross.setAttribute("x2", x(nearest)); cross.setAttribute("visibility", "visible");
      const rows = lines.map((l) => {
        let i = 0;
        l.curve.x.forEach((v, k) => { if (Math.abs(v - nearest) < Math.abs(l.curve.x[i] - nearest)) i = k; });
        const value = chart.percent ? percent(l.curve.y[i]) : show(l.curve.y[i]);
        const range = l.curve.low ? ` (${show(l.curve.low[i])} to ${show(l.curve.high[i])})` : "";
        return make("div", {}, make("i", { style: `background:${l.colour}` }), `${many ? `${l.run.name}, ` : ""}${l.label}: ${value}${range}`);
      });
      tipAt(node, event, [make("div", {}, `step ${show(nearest)}`), ...rows]);
    });
    svg.addEventListener("pointerleave", () => { node.tip.style.display = "none"; cross.setAttribute("visibility", "hidden"); });
    const labels = many && chart.series.length === 1 ? [] : chart.series.map(([, label]) => lines.find((l) => l.label === label)).filter(Boolean);
    const mark = (l) => make("svg", { viewBox: "0 0 18 8" }, make("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-width": 2, style: `stroke:${many ? "var(--ink)" : l.colour};stroke-dasharray:${l.dash || "none"}` }));
    return [svg, legend(...labels.map((l) => [mark(l), l.label]))];
  };
  const redraws = [];
  const addChart = (grid, chart) => {
    const node = figure(chart.title, chart.say);
    const body = make("div");
    const draw = () => body.replaceChildren(...drawCurves(node, chart));
    addCsv(node, chart.title, () => [
      ["run", "metric", "step", "value", "least", "largest"],
      ...data.runs.flatMap((run) => chart.series.flatMap(([name]) => {
        const c = run.curves[name];
        return c ? c.x.map((step, i) => [run.name, name, step, c.y[i], c.low && c.low[i], c.high && c.high[i]]) : [];
      })),
    ]);
    addLogSwitch(node, chart, draw);
    node.append(body, node.tip);
    grid.append(node);
    redraws.push(draw);
  };

  // ------------------------------------------------------------------ one evaluation's numbers
  const W = 340, H = 300, box = { left: 62, right: W - 22, top: 8, bottom: H - 36 };
  const coverage = (n) => {
    const node = figure("Do intervals hold what they promise?", "On the diagonal they do; above it they are too wide, below it too narrow.");
    const svg = frame(W, H, "Coverage");
    const x = scale(0, 1, box.left, box.right), y = scale(0, 1, box.bottom, box.top);
    const grid = [0, 0.25, 0.5, 0.75, 1];
    axes(svg, box, x, y, grid, grid, percent, percent, "Level of the interval", "Share of numbers in it");
    const m = n.measured || n.count;
    const reach = (p) => 2.576 * Math.sqrt((p * (1 - p)) / m);
    const ps = Array.from({ length: 41 }, (_, i) => i / 40);
    const edge = (sign) => ps.map((p) => [x(p), y(Math.max(0, Math.min(1, p + sign * reach(p))))]);
    svg.append(band(edge(1), edge(-1), "var(--quiet)"));
    svg.append(make("line", { class: "at", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }));
    const drawn = [["raw", "the law's own", 0], ["conformal", "recalibrated", 2]];
    for (const [key, , c] of drawn) {
      const points = n.levels.map((p, i) => [p, n[key][i]]).filter((v) => v[1] !== null);
      svg.append(make("path", { class: "line", d: pathOf(points.map(([p, v]) => [x(p), y(v)])), style: `stroke:${colour(c)}` }));
      for (const [p, v] of points) svg.append(make("circle", { cx: x(p), cy: y(v), r: 2.4, fill: colour(c) }, make("title", {}, `${percent(p)} intervals hold ${percent(v)}`)));
    }
    addCsv(node, "Coverage", () => [["level", "raw", "recalibrated"], ...n.levels.map((p, i) => [p, n.raw[i], n.conformal[i]])]);
    const swatch = (style) => make("i", { class: "swatch", style: `background:${style}` });
    const labels = drawn.map(([, label, c]) => [swatch(colour(c)), label]);
    node.append(svg, legend(...labels, [swatch("var(--quiet);opacity:.35"), "99 % by chance"]));
    return node;
  };
  const pit = (n) => {
    const node = figure("Where the truth falls (PIT)", `${show(n.count)} numbers in ${n.pit.length} bins; the band shows the scatter of a calibrated model by chance.`);
    const svg = frame(W, H, "PIT");
    const bins = n.pit.length, even = n.count / bins;
    const high = Math.max(...n.pit, even * 1.6) * 1.06;
    const x = scale(0, 1, box.left, box.right), y = scale(0, high, box.bottom, box.top);
    axes(svg, box, x, y, [0, 0.25, 0.5, 0.75, 1], ticks(0, high, 5), show, show, "Where the truth falls in the predicted law, F(truth)", "Numbers");
    const reach = 2.576 * Math.sqrt(even * (1 - 1 / bins));
    svg.append(make("rect", { class: "band", x: box.left, width: box.right - box.left, y: y(Math.min(high, even + reach)), height: y(Math.max(0, even - reach)) - y(Math.min(high, even + reach)), fill: "var(--quiet)" }));
    n.pit.forEach((count, i) => svg.append(make("rect", { x: x(i / bins) + 1, width: x(1 / bins) - x(0) - 2, y: y(count), height: y(0) - y(count), fill: colour(0), opacity: 0.8, rx: 1.5 }, make("title", {}, `${percent(i / bins)} to ${percent((i + 1) / bins)}: ${count} numbers`))));
    svg.append(make("line", { class: "at", x1: box.left, x2: box.right, y1: y(even), y2: y(even) }));
    addCsv(node, "PIT", () => [["from", "to", "numbers"], ...n.pit.map((count, i) => [i / bins, (i + 1) / bins, count])]);
    node.append(svg, legend("flat: calibrated · hump in the middle: too wide · at the ends: too narrow · slanted: biased"));
    return node;
  };
  const abstaining = (risks) => {
    const node = figure("What abstaining buys", "The surest held-out answers only. A line that falls to the left: the model knows where it errs.");
    const svg = frame(W, H, "Abstaining"), drawn = risks.filter(([, values]) => values?.at(-1) > 0);
    const of = drawn.map(([label, values]) => [label, values.map((v) => v / values.at(-1))]), shares = (i) => 0.05 * (i + 1);
    const high = Math.max(1.05, ...of.flatMap(([, values]) => values));
    const x = scale(0, 1, box.left, box.right), y = scale(0, high, box.bottom, box.top);
    axes(svg, box, x, y, [0, 0.25, 0.5, 0.75, 1], ticks(0, high, 5), percent, percent, "Share of held-out answers, the surest", "Error, of that of all answers");
    svg.append(make("line", { class: "at", x1: x(0), x2: x(1), y1: y(1), y2: y(1) }));
    of.forEach(([label, values], c) => {
      svg.append(make("path", { class: "line", d: pathOf(values.map((v, i) => [x(shares(i)), y(v)])), style: `stroke:${colour(2 * c)}` }));
      values.forEach((v, i) => svg.append(make("circle", { cx: x(shares(i)), cy: y(v), r: 2.4, fill: colour(2 * c) }, make("title", {}, `${label}, surest ${percent(shares(i))}: ${show(drawn[c][1][i])}`))));
    });
    addCsv(node, "Abstaining", () => [["share", ...drawn.map(([label]) => label)], ...of[0][1].map((_, i) => [shares(i), ...drawn.map(([, values]) => values[i])])]);
    node.append(svg, legend(...of.map(([label], c) => [make("i", { class: "swatch", style: `background:${colour(2 * c)}` }), label])));
    return node;
  };
  const predicted = (n) => {
    const node = figure("Predicted against true", "On the diagonal: right.");
    const sorted = [...n.true].sort((a, b) => a - b);
    const middle = Math.max(1e-9, (sorted[Math.floor(sorted.length * 0.75)] - sorted[Math.floor(sorted.length * 0.25)]) || Math.abs(sorted[Math.floor(sorted.length / 2)]));
    const axis = { log: n.by_log ?? Math.max(...n.true) - Math.min(...n.true) > 30 * middle };
    const body = make("div");
    const draw = () => {
      const svg = frame(W, H, "Predicted against true"), log = axis.log;
      const f = log ? (v) => Math.sign(v) * Math.log10(1 + Math.abs(v)) : (v) => v;
      let low = Math.min(...n.true.map(f)), high = Math.max(...n.true.map(f));
      const clipped = n.predicted.map(f).sort((a, b) => a - b);
      low = Math.min(low, clipped[Math.floor(clipped.length * 0.01)]); high = Math.max(high, clipped[Math.ceil((clipped.length - 1) * 0.99)]);
      const pad = (high - low) * 0.04 || 1; low -= pad; high += pad;
      const x = scale(low, high, box.left, box.right), y = scale(low, high, box.bottom, box.top);
      const marks = log ? [...new Set(ticks(low, high, 5).map((v) => Math.round(v)))].filter((v) => v >= low && v <= high) : ticks(low, high, 4);
      const name = (v) => (log ? show(Math.sign(v) * Math.round(10 ** Math.abs(v) - (v ? 0 : 1))) : show(v));
      axes(svg, box, x, y, marks, marks, name, name, "True", "Predicted");
      svg.append(make("line", { class: "at", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }));
      const clip = (v) => Math.min(box.bottom, Math.max(box.top, v));
      const few = n.true.length <= 250;
      let beyond = 0;
      n.true.forEach((t, i) => {
        const cx = x(f(t));
        if (few) svg.append(make("line", { x1: cx, x2: cx, y1: clip(y(f(n.low[i]))), y2: clip(y(f(n.high[i]))), stroke: colour(0), opacity: 0.22, "stroke-width": 1.5 }));
        const at = y(f(n.predicted[i])), cy = clip(at), odd = n.outside?.[i];
        const said = make("title", {}, `true ${show(t)}, predicted ${show(n.predicted[i])}, 90 % interval ${show(n.low[i])} to ${show(n.high[i])}${odd ? `; outside: ${odd}` : ""}`);
        const look = { fill: colour(odd ? 1 : 0), opacity: few ? 0.85 : 0.45 };
        beyond += cy !== at;
        if (cy === at) svg.append(make("circle", { cx, cy, r: few ? 2.6 : 1.9, ...look }, said));
        else svg.append(make("path", { class: "beyond", d: `M${cx - 4} ${cy}h8l-4 ${at < cy ? -7 : 7}z`, ...look }, said));
      });
      const which = n.interval === "conformal" ? "recalibrated" : "the law's own";
      const odd = (n.outside || []).filter(Boolean).length;
      const notes = [few ? `bars: 90 % intervals, ${which}` : `${n.true.length} of ${show(n.count)} numbers`];
      if (beyond) notes.push(`triangles: ${beyond} beyond the axis`);
      if (odd) notes.push([make("i", { class: "swatch", style: `background:${colour(1)}` }), `${odd} far outside of what was learnt`]);
      body.replaceChildren(svg, legend(...notes));
    };
    addCsv(node, "Predicted", () => [["true", "predicted", "low", "high"], ...n.true.map((t, i) => [t, n.predicted[i], n.low[i], n.high[i]])]);
    addLogSwitch(node, axis, draw);
    node.append(body);
    draw();
    return node;
  };
  // lines over groups of held-out rows, from the smallest to the largest
  const byDecile = (title, say, groups, lines, xTitle, yTitle, { percentage = false, log = false, at = null } = {}) => {
    const node = figure(title, say), state = { log }, form = percentage ? percent : show;
    const body = make("div");
    const draw = () => {
      const svg = frame(W, H, title), values = lines.flatMap(([, of]) => groups.map(of)).concat(at === null ? [] : [at]);
      let low = percentage ? Math.min(...values, 0.7) : state.log ? Math.min(...values.filter((v) => v > 0)) : 0, high = Math.max(...values);
      if (percentage) high = 1; else high = (Number.isFinite(low) && high > low ? high : low + 1) * 1.05;
      const x = scale(1, Math.max(2, groups.length), box.left + 12, box.right - 12), y = scale(low, high, box.bottom, box.top, state.log);
      const some = groups.map((_, i) => i + 1).filter((i) => i % Math.ceil(groups.length / 5) === 1 || groups.length < 5);
      axes(svg, box, x, y, some, state.log ? logTicks(low, high) : ticks(low, high, 5), (i) => show(groups[i - 1].from), form, xTitle, yTitle);
      if (at !== null) svg.append(make("line", { class: "at", x1: box.left, x2: box.right, y1: y(at), y2: y(at) }));
      lines.forEach(([label, of], c) => {
        const points = groups.map((group, i) => [x(i + 1), y(of(group)), group]).filter((p) => Number.isFinite(p[1]));
        svg.append(make("path", { class: "line", d: pathOf(points), style: `stroke:${colour(c)}` }));
        for (const [cx, cy, group] of points) svg.append(make("circle", { cx, cy, r: 3, fill: colour(c) }, make("title", {}, `${label}: ${form(of(group))}; ${group.rows} rows from ${show(group.from)} to ${show(group.to)}`)));
      });
      body.replaceChildren(svg, legend(...lines.map(([label], c) => [make("i", { class: "swatch", style: `background:${colour(c)}` }), label])));
    };
    addCsv(node, title, () => [["from", "to", "rows", ...lines.map(([label]) => label)], ...groups.map((g) => [g.from, g.to, g.rows, ...lines.map(([, of]) => of(g))])]);
    if (!percentage) addLogSwitch(node, state, draw);
    node.append(body);
    draw();
    return node;
  };
  const addFit = (root) => {
    const { target, rows, by_log, points, deciles } = data.runs[+root.dataset.run].fit;
    const { predicted: sizes, width_90: widths, length: lengths } = deciles;
    const models = Object.keys(sizes[0].mae).map((name) => [name, (group) => group.mae[name]]);
    const held = [["90 % intervals", (group) => group.coverage_90]];
    const size = `Predicted ${target}, from`, width = "Width of the 90 % interval, from";
    root.append(
      predicted({ ...points, by_log, count: rows, interval: "conformal" }),
      byDecile("Errors by predicted size", "Held-out rows in groups of equal size, from the smallest prediction to the largest.", sizes, models, size, "Mean absolute error", { log: by_log }),
      byDecile("Intervals by predicted size", "How often the truth is in the 90 % interval.", sizes, held, size, "Share of rows", { percentage: true, at: 0.9 }),
      byDecile("Errors by width of the interval", "Wide intervals should mean large errors.", widths, models, width, "Mean absolute error", { log: by_log }),
      byDecile("Intervals by their width", "Narrow intervals should hold as often as wide ones.", widths, held, width, "Share of rows", { percentage: true, at: 0.9 }),
      ...(lengths ? [byDecile("Intervals by the length of the text", "Short rows against long ones.", lengths, held, "Characters, from", "Share of rows", { percentage: true, at: 0.9 })] : []),
    );
  };
  const addEvaluations = (root) => {
    data.runs.forEach((run, r) => {
      const found = run.evaluations.filter((e) => e.numbers || e.words?.length);
      if (!found.length) return;
      const group = make("div", { class: "group" }), three = make("div", { class: "three" });
      const select = make("select", { "aria-label": "Evaluation" });
      found.forEach((e, i) => select.append(make("option", { value: i }, e.step === 0 ? "before training" : `step ${show(e.step)}, stage ${e.stage}`)));
      select.value = found.length - 1;
      const head = make("h3", {}, many ? make("span", { class: `swatch run${r % 6}` }) : "", many ? `${run.name}: ` : "", "Held-out answers", select);
      const draw = () => {
        const { numbers, words } = found[+select.value], risks = [["words wrong", words], ["median error of numbers", numbers?.risk]];
        const drawn = risks.some(([, values]) => values?.at(-1) > 0) ? [abstaining(risks)] : [];
        three.replaceChildren(...(numbers ? [coverage, pit, predicted].map((each) => each(numbers)) : []), ...drawn);
      };
      select.addEventListener("change", draw);
      draw();
      group.append(head, three);
      root.append(group);
    });
  };

  // ------------------------------------------------------------------ the page
  for (const grid of document.querySelectorAll(".charts")) {
    const section = grid.dataset.section;
    if (section === "all") {
      for (const name of data.others) addChart(grid, { title: name, unit: name.split("/").pop(), series: [[name, name.split("/").pop()]], say: "", log: false, percent: false, at: [] });
    } else for (const chart of data.charts) if (chart.section === section) addChart(grid, chart);
  }
  redraws.forEach((draw) => draw()); // after layout, when every card has its width
  const numbers = document.getElementById("evaluations");
  document.querySelectorAll(".fit").forEach(addFit);
  if (numbers) addEvaluations(numbers);
  document.getElementById("smooth").addEventListener("change", (event) => { smooth = event.target.checked; redraws.forEach((draw) => draw()); });
  const shown = document.getElementById("shown");
  if (shown)
    data.runs.forEach((run, r) => {
      const box = make("input", { type: "checkbox", checked: "" });
      box.addEventListener("change", () => { box.checked ? hidden.delete(r) : hidden.add(r); redraws.forEach((draw) => draw()); });
      shown.append(make("label", {}, box, " ", make("span", { class: `swatch run${r % 6}` }), run.name));
    });
  document.documentElement.dataset.charts = String(document.querySelectorAll(".charts figure").length);
})();
