"use strict";
/* Read-outs: the pointer or the arrow keys name the values under them. The page is complete without this. */
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const short = (v) => (v === null ? "no value" : Number(v.toPrecision(4)).toString().replace("-", "−"));
  const shape = (svg, tag, name) => {
    const node = document.createElementNS(NS, tag);
    node.setAttribute("class", name);
    node.setAttribute("visibility", "hidden");
    svg.append(node);
    return node;
  };
  const place = (node, values) => {
    for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
    node.setAttribute("visibility", "visible");
  };
  const inside = (svg, event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [((event.clientX - box.left) / box.width) * view.width, ((event.clientY - box.top) / box.height) * view.height];
  };
  /* Wires one drawing: point(x, y) and step(dx, dy) show something, hide() ends it. */
  const wire = (svg, point, step, hide) => {
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => point(...inside(svg, event)));
    svg.addEventListener("pointerdown", (event) => point(...inside(svg, event)));
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
      if (event.key === "Escape") return hide();
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      if (step(...moves[event.key])) event.preventDefault();
    });
  };

  for (const svg of document.querySelectorAll("svg.chart")) {
    const plot = JSON.parse(svg.dataset.plot), out = svg.closest("figure").querySelector(".readout");
    const curves = [...svg.querySelectorAll("path.curve:not(.faint)")].map((path) => ({
      label: path.dataset.label,
      points: [...path.getAttribute("d").matchAll(/[ML](-?[\d.]+) (-?[\d.]+)/g)].map((m) => [Number(m[1]), Number(m[2])]),
    })).filter((curve) => curve.points.length);
    if (!curves.length) continue;
    const value = ([low, high, start, stop], pixel, log) => {
      const share = (pixel - start) / (stop - start);
      return log ? low * Math.pow(high / low, share) : low + share * (high - low);
    };
    const all = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
    const line = shape(svg, "line", "crosshair");
    let at = null;
    const nearest = (points, x) => points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
    const show = (x) => {
      at = all.reduce((best, v) => (Math.abs(v - x) < Math.abs(best - x) ? v : best));
      place(line, { x1: at, x2: at, y1: plot.y[2], y2: plot.y[3] });
      const parts = curves.map((curve) => {
        const p = nearest(curve.points, at);
        return Math.abs(p[0] - at) > 12 ? null : `${curve.label} ${short(value(plot.y, p[1], plot.log))}`;
      });
      const read = value(plot.x, at, false), named = plot.fineX ? short(read) : Math.round(read);
      out.textContent = `${plot.xTitle} ${named}: ` + parts.filter(Boolean).join(" · ");
    };
    const hide = () => { line.setAttribute("visibility", "hidden"); out.textContent = ""; };
    wire(svg, show, (dx) => {
      if (!dx) return false;
      const index = at === null ? (dx > 0 ? -1 : all.length) : all.indexOf(at);
      const stride = Math.max(1, Math.round(all.length / 100));
      show(all[Math.min(all.length - 1, Math.max(0, index + dx * stride))]);
      return true;
    }, hide);
  }

  for (const svg of document.querySelectorAll("svg.heat")) {
    const heat = JSON.parse(svg.dataset.heat), out = svg.closest("figure").querySelector(".readout");
    const cell = shape(svg, "rect", "cell");
    let probe = 0, site = 0;
    const show = (p, s) => {
      probe = Math.min(heat.steps.length - 1, Math.max(0, p));
      site = Math.min(heat.y.length - 2, Math.max(0, s));
      place(cell, {
        x: heat.x[probe], width: heat.x[probe + 1] - heat.x[probe],
        y: heat.y[site + 1], height: heat.y[site] - heat.y[site + 1],
      });
      out.textContent = `step ${heat.steps[probe]}, ${heat.rows} ${site}: ${short(heat.values[probe][site])}`;
    };
    const hide = () => { cell.setAttribute("visibility", "hidden"); out.textContent = ""; };
    wire(svg, (x, y) => {
      const p = heat.x.findIndex((edge) => edge > x) - 1, s = heat.y.findIndex((edge) => edge < y) - 1;
      if (p < 0 || s < 0) hide(); else show(p, s);
    }, (dx, dy) => { show(probe + dx, site + dy); return true; }, hide);
  }

  for (const svg of document.querySelectorAll("svg.lives")) {
    const out = svg.closest("figure").querySelector(".readout");
    const bars = [...svg.querySelectorAll("g.bar")].map((bar) => ({ box: bar.getBBox(), label: bar.querySelector("title").textContent }));
    const frame = shape(svg, "rect", "cell");
    let at = -1;
    const show = (index) => {
      at = Math.min(bars.length - 1, Math.max(0, index));
      const { x, y, width, height } = bars[at].box;
      place(frame, { x, y, width, height });
      out.textContent = bars[at].label;
    };
    const hide = () => { frame.setAttribute("visibility", "hidden"); out.textContent = ""; };
    wire(svg, (x, y) => {
      const index = bars.findLastIndex(({ box }) => box.y <= y);
      if (index < 0 || y > bars[bars.length - 1].box.y + bars[bars.length - 1].box.height) hide(); else show(index);
    }, (dx, dy) => { show(at - dy + dx); return true; }, hide);
  }
})();
