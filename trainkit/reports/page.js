"use strict";
// Hover reads values, dragging zooms along x, a double click shows all. Without it the page is whole.
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const svg = figure.querySelector("svg.chart");
  const lines = svg.querySelector(".lines");
  const readout = figure.querySelector(".readout");
  const [low, high] = figure.dataset.x.split(" ").map(Number);
  const [bottom, top] = figure.dataset.y.split(" ").map(Number);
  const SIZE = 10000;
  let view = [0, SIZE];
  const series = new Map();
  for (const line of lines.querySelectorAll("polyline[data-name]")) {
    const points = line.getAttribute("points").split(" ").map(p => p.split(",").map(Number));
    series.set(line.dataset.name, (series.get(line.dataset.name) || []).concat(points));
  }
  for (const points of series.values()) points.sort((a, b) => a[0] - b[0]);
  const make = (name, kind) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    made.setAttribute("class", kind);
    made.setAttribute("visibility", "hidden");
    svg.append(made);
    return made;
  };
  const cursor = make("line", "cursor"), band = make("rect", "band");
  const number = value => {
    for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]])
      if (Math.abs(value) >= size) return Number((value / (unit === " k" ? 1e3 : size)).toPrecision(4)) + unit;
    return String(Number(value.toPrecision(5)));
  };
  const place = event => {
    const box = svg.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const value = part => view[0] + part * (view[1] - view[0]);
  const onX = at => low + (high - low) * at / SIZE;
  const show = () => {
    lines.setAttribute("viewBox", `${view[0]} 0 ${view[1] - view[0]} ${SIZE}`);
    const left = onX(view[0]), width = onX(view[1]) - left;
    const power = 10 ** Math.floor(Math.log10(width / 4));
    const step = power * [1, 2, 5, 10].find(size => power * size >= width / 4 * (1 - 1e-9));
    const first = Math.ceil(left / step - 1e-9);
    svg.querySelectorAll(".tick-x").forEach((tick, i) => {
      const part = ((first + i) * step - left) / width;
      tick.textContent = part > 1 + 1e-9 ? "" : number((first + i) * step);
      tick.setAttribute("x", `${100 * Math.min(part, 1)}%`);
      tick.setAttribute("class", `tick-x ${part < 0.05 ? "begin" : part > 0.93 ? "end" : "mid"}`);
    });
  };
  let from = null;
  svg.addEventListener("pointermove", event => {
    const part = place(event), at = value(part);
    const words = [`${figure.dataset.xname} ${number(onX(at))}`];
    for (const [name, points] of series) {
      let left = 0, right = points.length - 1;
      while (left < right) {
        const middle = (left + right) >> 1;
        if (points[middle][0] < at) left = middle + 1; else right = middle;
      }
      if (left && at - points[left - 1][0] < points[left][0] - at) left -= 1;
      words.push(`${name} ${number(top - (top - bottom) * points[left][1] / SIZE)}`);
    }
    readout.textContent = words.join(" · ");
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * part}%`);
    cursor.setAttribute("y1", "0"); cursor.setAttribute("y2", "100%");
    cursor.setAttribute("visibility", "visible");
    if (from === null) return;
    band.setAttribute("x", `${100 * Math.min(from, part)}%`);
    band.setAttribute("width", `${100 * Math.abs(part - from)}%`);
    band.setAttribute("height", "100%");
    band.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") from = place(event); });
  svg.addEventListener("pointerup", event => {
    const to = place(event);
    band.setAttribute("visibility", "hidden");
    if (from !== null && Math.abs(to - from) > 0.02) {
      view = [value(Math.min(from, to)), value(Math.max(from, to))];
      show();
    }
    from = null;
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); });
  svg.addEventListener("dblclick", () => { view = [0, SIZE]; show(); });
}
