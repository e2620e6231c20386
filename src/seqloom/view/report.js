// Draws a report from the JSON in #data: sections are built once, those of a step anew when another planner is chosen.
// Every text goes through textContent, so nothing that a file or a name contains is read as HTML.
"use strict";
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 64, top: 38, bottom: 24, right: 8 };
  const FAINT = data.colours.forward_opacity, UNIT = data.unit;
  const main = document.querySelector("main");

  // -- words and elements ----------------------------------------------------------------------------------------

  const number = (value, digits = 0, least = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: least });
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const duration = (ns) => {
    const [unit, size] = ns >= 1e9 ? ["s", 1e9] : ns >= 1e6 ? ["ms", 1e6] : ["us", 1e3];
    const value = ns / size;
    return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
  };
  const tokens = (count) => (count >= 1024 && count % 1024 === 0 ? `${number(count / 1024)}K` : number(count));
  const rankText = (ranks) => (ranks.length === 1 ? `${UNIT} ${ranks[0]}` : contiguous(ranks)
    ? `${UNIT}s ${ranks[0]}-${ranks[ranks.length - 1]}` : `${UNIT}s ${ranks.join(", ")}`);
  const contiguous = (ranks) => ranks[ranks.length - 1] - ranks[0] === ranks.length - 1;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else made.setAttribute(key, value);
    }
    made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return made;
  }

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function section(parent, id, title, words) {
    const made = element("section", { id }, element("h2", {}, title));
    if (words) made.append(element("p", {}, words));
    parent.append(made);
    return made;
  }

  function table(columns, rows) {
    const kinds = columns.map(([, kind]) => kind || "");
    const head = element("tr", {}, ...columns.map(([name, kind]) => element("th", { class: kind ? "text" : "" }, name)));
    const cells = (row) => row.map((cell, k) => element("td", { class: kinds[k] }, cell));
    const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row))));
    return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), body));
  }

  function legend(entries) {
    return element("div", { class: "legend" }, ...entries.map(([colour, words, opacity]) =>
      element("span", {}, element("i", { style: `background:${colour};opacity:${opacity || 1}` }), words)));
  }

  function degreeColour(degree) {
    if (!degree) return data.colours.end;
    return data.colours.degrees[Math.min(31 - Math.clz32(degree), data.colours.degrees.length - 1)];
  }

  function ticks(from, to, most) {
    const power = 10 ** Math.floor(Math.log10(Math.max(to - from, 1e-12) / most));
    const step = power * [1, 2, 5, 10].find((factor) => (to - from) / (power * factor) <= most);
    const found = [];
    for (let k = Math.ceil(from / step); k * step <= to * (1 + 1e-12); k++) found.push(k * step);
    return found;
  }

  // -- charts of columns and lines -------------------------------------------------------------------------------

  // An SVG as wide as the page, whose texts keep their size: `paint(svg, box)` draws it, again when the width changes.
  function figure(label, height, paint) {
    const made = element("div", { class: "figure" });
    made.redraw = () => {
      const width = main.clientWidth;
      const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
      paint(svg, { left: 60, right: width - 8, top: 12, bottom: height - 28 });
      made.replaceChildren(svg);
    };
    made.redraw();
    return made;
  }

  function axisLabel(svg, x, box, words) {
    const anchor = x < box.left + 24 ? "start" : x > box.right - 24 ? "end" : "middle";
    const at = { start: Math.max(x - 12, box.left), middle: x, end: box.right }[anchor];
    svg.append(shape("text", { x: at, y: box.bottom + 18, "text-anchor": anchor }, words));
  }

  function scaleLines(svg, low, high, format, box) {
    for (const tick of ticks(low, high, 4)) {
      const y = box.bottom - (box.bottom - box.top) * (tick - low) / (high - low);
      svg.append(shape("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
      svg.append(shape("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, format(tick)));
    }
  }

  function histogram(lengths) {
    const names = ["sequences", "tokens", "attention"], colours = data.colours.histogram;
    const most = Math.max(...lengths.flatMap((row) => names.map((name) => row[name])), 1e-9);
    const drawn = figure("Lengths of the batch", 220, (svg, box) => {
      scaleLines(svg, 0, most, (share) => `${number(100 * share, 1)} %`, box);
      const pitch = Math.min(90, (box.right - box.left) / lengths.length), bar = pitch * 0.26;
      lengths.forEach((row, n) => {
        const middle = box.left + pitch * (n + 0.5);
        names.forEach((name, k) => {
          const height = (box.bottom - box.top) * row[name] / most;
          const made = shape("rect", { x: middle + (k - 1.5) * bar, y: box.bottom - height, width: Math.max(bar - 1, 1), height, fill: colours[k] });
          const words = name === "attention" ? "attention work" : name;
          made.append(shape("title", {}, `${tokens(row.low)} to ${tokens(2 * row.low)} tokens: ${percent(row[name])} of ${words}`));
          svg.append(made);
        });
        if (pitch > 30 || n % 2 === 0) svg.append(shape("text", { x: middle, y: box.bottom + 18, "text-anchor": "middle" }, tokens(row.low)));
      });
    });
    return [drawn, legend([[colours[0], "share of sequences"], [colours[1], "share of tokens"], [colours[2], "share of attention work"]])];
  }

  function lineChart(label, series, format, fromZero = true, scaleFormat = format) {
    const points = series.flatMap((one) => one.points).filter(([, y]) => y !== null);
    if (!points.length) return element("p", {}, "No values.");
    const steps = series[0].points.map(([x]) => x), first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
    const values = points.map(([, y]) => y), low = fromZero ? 0 : values.reduce((a, b) => Math.min(a, b));
    const high = Math.max(values.reduce((a, b) => Math.max(a, b)), low + 1e-9);
    return figure(label, 230, (svg, box) => {
      const at = ([x, y]) => [box.left + (box.right - box.left) * (x - first) / (last - first),
        box.bottom - (box.bottom - box.top) * (y - low) / (high - low)];
      scaleLines(svg, low, high, (value) => scaleFormat(value, low, high), box);
      for (const tick of ticks(first, last, box.right < 500 ? 4 : 10).filter(Number.isInteger)) axisLabel(svg, at([tick, low])[0], box, number(tick));
      for (const { points: own, colour, dash } of series) {
        const known = own.filter(([, y]) => y !== null).map((point) => at(point).map((v) => v.toFixed(1)).join(" "));
        if (known.length === 1) known.push(known[0]);    // a round cap makes a dot of it
        if (known.length) svg.append(shape("path", { d: `M${known.join("L")}`, fill: "none", stroke: colour, "stroke-width": 2, "stroke-linecap": "round", "stroke-dasharray": dash || "" }));
      }
      const cursor = shape("line", { class: "grid", y1: box.top, y2: box.bottom, visibility: "hidden" });
      svg.append(cursor);
      svg.addEventListener("pointermove", (event) => {
        const wanted = first + (event.offsetX - box.left) / (box.right - box.left) * (last - first);
        const nearest = steps.reduce((best, step, k) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? k : best), 0);
        const x = at([steps[nearest], low])[0];
        for (const [key, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) cursor.setAttribute(key, value);
        const lines = series.filter((one) => one.points[nearest][1] !== null).map((one) => `${one.name} ${format(one.points[nearest][1])}`);
        showTip(event, [`step ${number(steps[nearest])}`, ...lines].join("\n"));
      });
      svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
    });
  }

  function memoryChart(step) {
    const most = Math.max(step.budget_gib, ...step.memory_gib), last = step.memory_gib.length - 1;
    return figure(`Memory of every ${UNIT}`, 200, (svg, box) => {
      scaleLines(svg, 0, most, (gib) => `${number(gib, most < 4 ? 2 : 0)} GiB`, box);
      const pitch = (box.right - box.left) / step.memory_gib.length, height = (gib) => (box.bottom - box.top) * gib / most;
      const bars = step.memory_gib.map((gib, rank) =>
        `M${(box.left + rank * pitch).toFixed(2)} ${box.bottom}v-${height(gib).toFixed(1)}h${(pitch * (pitch < 3 ? 1 : 0.85)).toFixed(2)}v${height(gib).toFixed(1)}z`);
      svg.append(shape("path", { d: bars.join(""), fill: data.colours.degrees[2] }));
      const y = box.bottom - height(step.budget_gib);
      svg.append(shape("line", { x1: box.left, x2: box.right, y1: y, y2: y, stroke: "currentColor", "stroke-dasharray": "5 4" }));
      for (const rank of new Set([0, last >> 1, last])) axisLabel(svg, box.left + (rank + 0.5) * pitch, box, `${UNIT} ${rank}`);
    });
  }

  // -- the timeline ----------------------------------------------------------------------------------------------

  class Timeline {
    constructor(step, parent) {
      this.step = step;
      this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": `Timeline of every ${UNIT} and node` });
      this.nodes = Math.ceil(step.ranks / step.node_size);
      this.longest = Math.max(...data.steps.map((one) => one.step_ns));
      this.view = { from: 0, to: step.step_ns, first: 0, last: step.ranks };
      parent.append(this.tools(), this.canvas, this.legend());
      this.listen();
      this.draw();
    }

    tools() {
      const zoom = (factor) => () => this.zoom(factor, (this.view.from + this.view.to) / 2);
      const made = element("div", { class: "tools" },
        element("button", { type: "button", id: "zoom-in", onclick: zoom(0.5) }, "Zoom in"),
        element("button", { type: "button", id: "zoom-out", onclick: zoom(2) }, "Zoom out"),
        element("button", { type: "button", id: "reset", onclick: () => this.show(0, this.step.step_ns) }, "Whole step"));
      if (data.steps.length > 1)
        made.append(element("button", { type: "button", id: "same-axis", onclick: () => this.show(0, this.longest) }, "Axis of the slowest"));
      if (this.nodes > 1) {
        const choice = element("select", { id: "rows", "aria-label": `${UNIT}s shown` }, element("option", { value: "" }, `all ${UNIT}s`));
        for (let node = 0; node < this.nodes; node++) choice.append(element("option", { value: node }, `node ${node}`));
        choice.addEventListener("change", () => {
          const { node_size: size, ranks } = this.step, node = Number(choice.value);
          [this.view.first, this.view.last] = choice.value === "" ? [0, ranks] : [node * size, Math.min((node + 1) * size, ranks)];
          this.draw();
        });
        made.append(choice);
      }
      made.append(element("p", {}, "Drag to pan, Ctrl + wheel or pinch to zoom, hover or tap for details."));
      return made;
    }

    legend() {
      const { runs } = this.step, degrees = [...new Set(runs.degree)].filter(Boolean).sort((a, b) => a - b);
      const byColour = new Map();
      for (const degree of degrees) byColour.set(degreeColour(degree), [...(byColour.get(degreeColour(degree)) || []), degree]);
      const entries = [...byColour].map(([colour, own]) => [colour, `${own.join(", ")} ${UNIT}${own.join() === "1" ? "" : "s"} per group`]);
      const colour = degreeColour(degrees[degrees.length >> 1] || 1);
      entries.push([colour, "forward (fainter)", FAINT], [colour, "backward"], [data.colours.end, "reduction, optimiser"]);
      if (this.step.nics.node.length) entries.push([data.colours.nic, "NICs of a node in use"]);
      return legend(entries);
    }

    listen() {
      const pressed = new Map();    // pointers on the canvas by id: one drags, two pinch
      let held = null;
      const hold = () => { held = { x: spread()[0], apart: spread()[1], ...this.view }; };
      const spread = () => {
        const [a, b = a] = pressed.values();
        return [(a + b) / 2, Math.max(Math.abs(a - b), 1)];
      };
      this.canvas.addEventListener("pointerdown", (event) => {
        this.canvas.setPointerCapture(event.pointerId);
        pressed.set(event.pointerId, event.offsetX);
        hold();
        this.hover(event);
      });
      this.canvas.addEventListener("pointermove", (event) => {
        if (!pressed.has(event.pointerId)) return this.hover(event);
        pressed.set(event.pointerId, event.offsetX);
        const [x, apart] = spread();
        if (pressed.size === 1 && Math.abs(x - held.x) < 3) return;
        tip.hidden = true;
        const span = (held.to - held.from) * (pressed.size > 1 ? held.apart / apart : 1);
        const width = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
        const around = held.from + (held.x - MARGIN.left) / width * (held.to - held.from), from = around - (x - MARGIN.left) / width * span;
        this.show(from, from + span);
      });
      for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, (event) => {
        pressed.delete(event.pointerId);
        if (pressed.size) hold();
      });
      this.canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      this.canvas.addEventListener("dblclick", () => this.show(0, this.step.step_ns));
      this.canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(Math.exp(event.deltaY / 300), this.time(event.offsetX));
      }, { passive: false });
      this.canvas.addEventListener("keydown", (event) => {
        const { from, to } = this.view, part = (to - from) / 8, middle = (from + to) / 2;
        const actions = { ArrowLeft: () => this.show(from - part, to - part), ArrowRight: () => this.show(from + part, to + part),
          "+": () => this.zoom(0.5, middle), "-": () => this.zoom(2, middle), 0: () => this.show(0, this.step.step_ns) };
        if (!(event.key in actions)) return;
        event.preventDefault();
        actions[event.key]();
      });
    }

    zoom(factor, around) {
      const { from, to } = this.view;
      this.show(around - (around - from) * factor, around + (to - around) * factor);
    }

    show(from, to) {
      const span = Math.min(Math.max(to - from, 1000), this.longest);
      this.view.from = Math.min(Math.max(from, 0), Math.max(this.longest - span, 0));
      this.view.to = this.view.from + span;
      this.draw();
    }

    scale() { return (this.canvas.clientWidth - MARGIN.left - MARGIN.right) / (this.view.to - this.view.from); }
    time(x) { return this.view.from + (x - MARGIN.left) / this.scale(); }

    sizes() {
      const rows = this.view.last - this.view.first, row = Math.min(22, Math.max(400 / rows, 0.25));
      const used = Math.ceil(rows / this.step.node_size), nic = this.step.nics.node.length ? Math.min(10, Math.max(80 / used, 0.5)) : 0;
      return { row, nic, ranksEnd: MARGIN.top + rows * row, nicsTop: MARGIN.top + rows * row + 8, nicsEnd: MARGIN.top + rows * row + 8 + used * nic };
    }

    draw() {
      const { canvas, step, view } = this, size = this.sizes(), ratio = window.devicePixelRatio || 1;
      const width = canvas.clientWidth, height = size.nicsEnd + MARGIN.bottom, style = getComputedStyle(document.body);
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      Object.assign(canvas.dataset, { from: view.from, to: view.to });
      const context = canvas.getContext("2d"), scale = this.scale(), x = (ns) => MARGIN.left + (ns - view.from) * scale;
      context.scale(ratio, ratio);
      context.font = `12px ${style.fontFamily}`;
      const soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line"), text = style.getPropertyValue("--text");
      context.save();
      context.beginPath();
      context.rect(MARGIN.left, 0, width - MARGIN.left - MARGIN.right, height);
      context.clip();
      this.drawRuns(context, x, size);
      this.drawNics(context, x, size);
      context.globalAlpha = 1;
      context.fillStyle = soft;
      for (const [round, start, stop] of step.rounds) {
        context.fillRect(x(start), 20, 1, size.nicsEnd - 20);
        const room = x(Math.min(stop, view.to)) - x(Math.max(start, view.from));
        if (room > 16) context.fillText(room > 60 ? `round ${round}` : round, x(Math.max(start, view.from)) + 4, 31);
      }
      context.fillRect(x(step.step_ns), 20, 1, size.nicsEnd - 20);
      if (step.bound_ns !== null) this.drawBound(context, x(step.bound_ns), size, text);
      context.restore();
      this.drawAxes(context, x, size, soft, line);
    }

    drawRuns(context, x, size) {
      const { runs, node_size: nodeSize } = this.step, { from, to, first, last } = this.view;
      const gap = size.row >= 4 ? 1 : 0, ratio = window.devicePixelRatio || 1;
      const snap = (y) => Math.round(y * ratio) / ratio;    // a part of a pixel would be paler than the colour of its degree
      for (let k = 0; k < runs.rank.length; k++) {
        const start = runs.start[k], stop = start + runs.length[k];
        if (stop < from || start > to) continue;
        const top = Math.max(runs.rank[k], first), bottom = Math.min(runs.rank[k] + runs.count[k], last);
        if (bottom <= top) continue;
        context.globalAlpha = data.pale.includes(runs.kind[k]) ? FAINT : 1;
        context.fillStyle = degreeColour(runs.degree[k]);
        const left = x(Math.max(start, from)), y = snap(MARGIN.top + (top - first) * size.row), end = snap(MARGIN.top + (bottom - first) * size.row);
        context.fillRect(left, y, Math.max(x(Math.min(stop, to)) - left, 0.3), Math.max(end - y - gap, 1 / ratio));
      }
      context.globalAlpha = 1;
      if (size.row * nodeSize >= 12) {
        context.fillStyle = getComputedStyle(document.body).backgroundColor;
        for (let rank = nodeSize * Math.ceil((first + 1) / nodeSize); rank < last; rank += nodeSize)
          context.fillRect(MARGIN.left, MARGIN.top + (rank - first) * size.row - 1.5, 1e5, 2);
      }
    }

    drawNics(context, x, size) {
      const { nics, node_size: nodeSize } = this.step, { from, to, first, last } = this.view;
      context.fillStyle = data.colours.nic;
      for (let k = 0; k < nics.node.length; k++) {
        const start = nics.start[k], stop = start + nics.length[k], row = nics.node[k] - Math.floor(first / nodeSize);
        if (stop < from || start > to || row < 0 || nics.node[k] * nodeSize >= last) continue;
        context.globalAlpha = Math.min(nics.use[k], 1);
        const left = x(Math.max(start, from));
        context.fillRect(left, size.nicsTop + row * size.nic, Math.max(x(Math.min(stop, to)) - left, 0.3), Math.max(size.nic - 1, 0.5));
      }
    }

    drawBound(context, at, size, colour) {
      context.strokeStyle = context.fillStyle = colour;
      context.setLineDash([5, 4]);
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(at, 16);
      context.lineTo(at, size.nicsEnd);
      context.stroke();
      context.setLineDash([]);
      const words = `lower bound ${duration(this.step.bound_ns)}`, fits = at - context.measureText(words).width > MARGIN.left;
      context.textAlign = fits ? "right" : "left";
      context.fillText(words, at, 12);
      context.textAlign = "left";
    }

    drawAxes(context, x, size, soft, line) {
      const { view, step } = this, { first, last } = view;
      context.fillStyle = soft;
      context.textAlign = "right";
      const every = size.row >= 13 ? 1 : step.node_size * Math.ceil(14 / (size.row * step.node_size));
      for (let rank = first; rank < last; rank += every) {
        const words = every === 1 ? `${UNIT} ${rank}` : this.nodes > 1 ? `node ${rank / step.node_size}` : `${UNIT}s ${rank}-${last - 1}`;
        const middle = every === 1 ? 0.5 * size.row : 0.5 * Math.min(step.node_size * size.row, 28);
        context.fillText(words, MARGIN.left - 6, MARGIN.top + (rank - first) * size.row + middle + 4);
      }
      if (size.nic) context.fillText("NICs", MARGIN.left - 6, (size.nicsTop + size.nicsEnd) / 2 + 4);
      context.textAlign = "center";
      const narrow = this.canvas.clientWidth < 500;
      for (const tick of ticks(view.from, view.to, narrow ? 3 : 8)) {
        context.fillRect(x(tick), size.nicsEnd, 1, 5);
        context.fillText(tick ? axisTime(tick, view) : "0", Math.min(x(tick), this.canvas.clientWidth - 24), size.nicsEnd + 18);
      }
      context.fillStyle = line;
      context.fillRect(MARGIN.left, size.nicsEnd, this.canvas.clientWidth - MARGIN.left - MARGIN.right, 1);
    }

    find(offsetX, offsetY) {
      const size = this.sizes(), time = this.time(offsetX), { runs, nics } = this.step;
      if (offsetX < MARGIN.left) return null;
      if (offsetY < size.ranksEnd) {
        const rank = this.view.first + Math.floor((offsetY - MARGIN.top) / size.row);
        for (let k = 0; k < runs.rank.length; k++)
          if (runs.rank[k] <= rank && rank < runs.rank[k] + runs.count[k] && runs.start[k] <= time && time < runs.start[k] + runs.length[k])
            return this.runText(k, rank);
        return rank < this.view.last && time < this.step.step_ns && rank >= 0 ? `${UNIT} ${rank} waits` : null;
      }
      const node = Math.floor(this.view.first / this.step.node_size) + Math.floor((offsetY - size.nicsTop) / size.nic);
      for (let k = 0; k < nics.node.length; k++)
        if (nics.node[k] === node && nics.start[k] <= time && time < nics.start[k] + nics.length[k])
          return `Node ${node}: NICs in use ${percent(nics.use[k])} of ${duration(nics.length[k])}`;
      return null;
    }

    runText(k, rank) {
      const { runs } = this.step, kind = data.kinds[runs.kind[k]];
      const lines = [`${UNIT} ${rank}: ${kind}`, `${duration(runs.length[k])} from ${duration(runs.start[k])}`];
      if (runs.round[k] >= 0) lines.push(`round ${runs.round[k]}${data.staged ? `, stage ${runs.stage[k]}` : ""}`);
      if (runs.comm[k]) lines.push(`exposed communication ${duration(runs.comm[k])}`);
      const group = this.step.groups.find((one) => one.pipeline === runs.pipeline[k] && one.stage === runs.stage[k]
        && one.round === runs.round[k] && one.group === runs.group[k]);
      if (group) lines.push(`${rankText(group.ranks)}, ${group.how}`, holds(group));
      return lines.join("\n");
    }

    hover(event) {
      const words = this.find(event.offsetX, event.offsetY);
      if (words === null) tip.hidden = true;
      else showTip(event, words);
    }
  }

  const tip = element("div", { id: "tip", role: "status", hidden: "" });

  function showTip(event, words) {
    tip.hidden = false;
    tip.textContent = words;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  }

  function axisTime(ns, view) {
    const [unit, size] = view.to >= 1e9 ? ["s", 1e9] : view.to >= 1e6 ? ["ms", 1e6] : ["us", 1e3];
    const digits = Math.max(0, Math.ceil(-Math.log10((view.to - view.from) / size / 8)));
    return `${(ns / size).toFixed(digits)} ${unit}`;
  }

  function holds(group) {
    const count = group.spans.length / 3, lengths = [];
    for (let k = 0; k < count; k++) lengths.push(group.spans[3 * k + 2] - group.spans[3 * k + 1]);
    return `${number(lengths.reduce((a, b) => a + b, 0))} tokens of ${count} sequence${count === 1 ? "" : "s"}`;
  }

  // -- sections of a step ----------------------------------------------------------------------------------------

  function cards(figures, entries) {
    return element("div", { class: "cards" }, ...entries.map(([key, value, words]) =>
      element("div", { class: "card", "data-figure": key, "data-value": figures[key] }, element("b", {}, value), element("span", {}, words))));
  }

  function stepCards(step) {
    const f = step.figures;
    return cards(f, [
      ["step_ms", duration(step.step_ns), "predicted step"],
      ["gap", f.gap === null ? "not proven" : percent(f.gap), step.bound_ns === null ? "gap to the bound" : `above the bound of ${duration(step.bound_ns)}`],
      ["idle_share", percent(f.idle_share), `of ${UNIT} time idle`],
      ["comm_share", percent(f.comm_share), "exposed communication"],
      ["peak_memory_gib", `${f.peak_memory_gib.toFixed(1)} GiB`, `of ${step.budget_gib.toFixed(1)} on the fullest ${UNIT}`],
      ["tokens", number(f.tokens), `tokens in ${number(f.sequences)} sequences`],
      ["rounds", number(f.rounds), f.rounds === 1 ? "round" : "rounds"]]);
  }

  const FIRST_ROWS = 10;

  function holdings(step, parent) {
    const made = section(parent, "holds", "Who holds what", `Every group of ${UNIT}s, round by round, and the sequences that it works on.`);
    const rank = element("input", { type: "number", min: "0", max: step.ranks - 1, placeholder: "any", id: "of-gpu", style: "width:90px" });
    const place = element("div"), columns = [["round"], [`${UNIT}s`, "text"], ["how", "text"], ["sequences"], ["tokens"], ["longest"], ["sequence: tokens", "wide"]];
    let shown = FIRST_ROWS;
    const draw = () => {
      const chosen = rank.value === "" ? step.groups : step.groups.filter((one) => one.ranks.includes(Number(rank.value)));
      const rows = chosen.slice(0, shown).map((group) => {
        const spans = [];
        for (let k = 0; k < group.spans.length; k += 3) spans.push([group.spans[k], group.spans[k + 2] - group.spans[k + 1]]);
        spans.sort((a, b) => b[1] - a[1]);
        const named = spans.slice(0, 8).map(([id, count]) => `${id}: ${number(count)}`).join(", ") + (spans.length > 8 ? `, ${spans.length - 8} more` : "");
        const name = data.staged ? `${group.pipeline}.${group.round}, stage ${group.stage}` : group.round;
        return [name, rankText(group.ranks), group.how, spans.length, number(spans.reduce((sum, one) => sum + one[1], 0)), spans.length ? number(spans[0][1]) : 0, named];
      });
      place.replaceChildren(table(columns, rows));
      if (chosen.length > shown)
        place.append(element("button", { type: "button", onclick: () => { shown *= 4; draw(); } }, `Show more of ${number(chosen.length)} groups`));
    };
    rank.addEventListener("input", () => { shown = FIRST_ROWS; draw(); });
    made.append(element("div", { class: "tools" }, element("label", { for: "of-gpu" }, `of ${UNIT}`), rank), place);
    draw();
  }

  function reasons(step, parent) {
    const made = section(parent, "why", "Why each class of sequences is placed so", step.unexplained ||
      `Costs are ${UNIT}-milliseconds of one sequence, summed over the ${UNIT}s that work on it: as placed, whole on one ${UNIT}, and in the next best shape.`);
    if (step.unexplained) return;
    const columns = [["tokens"], ["sequences"], ["zone", "text"], ["how", "text"], ["why", "text"], ["cost"], ["whole"], ["next best", "text"], ["cost"]];
    const words = { memory: `one ${UNIT} has not the memory`, time: `on one ${UNIT} it would end late`, cheapest: "cheapest", "not cheapest": `balances the ${UNIT}s, or the planner's rule` };
    made.append(table(columns, step.classes.map((one) => [one.lengths.map((n) => number(n)).filter((n, k, all) => all.indexOf(n) === k).join(" - "),
      number(one.documents), one.zone, one.method, words[one.reason] || one.reason, number(one.rank_ms, 1, 1), number(one.whole_rank_ms, 1, 1),
      one.next_best || "none fits", one.next_best_rank_ms === null ? "" : number(one.next_best_rank_ms, 1, 1)])));
  }

  let timeline = null;

  function showStep(index, place) {
    const step = data.steps[index], top = element("div", { id: "step", "data-name": step.name });
    place.replaceChildren(top);
    tip.hidden = true;
    for (const button of document.querySelectorAll("[data-step]")) button.setAttribute("aria-pressed", Number(button.dataset.step) === index);
    if (data.run !== null) section(top, "plan", `Plan of ${step.name}`, "As predicted.").append(stepCards(step));
    else top.append(stepCards(step));
    timeline = new Timeline(step, section(top, "timeline", `Timeline: ${step.name}`, `A row per ${UNIT}, below them a row per node with NICs; the page shows through where a ${UNIT} waits.`));
    section(top, "lengths", "Lengths", "Sequences by length, from so many tokens to twice as many.").append(...histogram(step.lengths));
    holdings(step, top);
    section(top, "memory", "Memory", `Predicted peak of every ${UNIT}; the dashed line is the budget.`).append(memoryChart(step));
    reasons(step, top);
  }

  function planners(parent) {
    const made = section(parent, "planners", "Planners", "The same batch, planned in several ways; choose one to see its step.");
    const slowest = Math.max(...data.steps.map((step) => step.step_ns)), first = data.steps[0].step_ns;
    made.append(element("div", { class: "tabs" }, ...data.steps.map((step, k) =>
      element("button", { type: "button", "data-step": k, onclick: () => showStep(k, place) }, step.name))));
    const columns = [["planner", "text"], ["step"], ["", "text"], ["speed-up"], ["above bound"], ["idle"], ["communication"], ["memory, GiB"], ["rounds"]];
    const timed = data.steps.some((step) => step.figures.plan_ms !== null);
    if (timed) columns.push(["to plan"]);
    made.append(table(columns, data.steps.map((step) => {
      const f = step.figures;
      const bar = element("span", { class: "bar", style: `width:calc(var(--bar) * ${(step.step_ns / slowest).toFixed(4)})` });
      return [step.name, duration(step.step_ns), bar, `${(first / step.step_ns).toFixed(2)}x`, f.gap === null ? "" : percent(f.gap), percent(f.idle_share),
        percent(f.comm_share), f.peak_memory_gib.toFixed(1), f.rounds, ...(timed ? [f.plan_ms === null ? "" : duration(1e6 * f.plan_ms)] : [])];
    })));
  }

  function run(parent, { figures, columns, each }) {
    const of = (key) => columns.step.map((step, k) => [step, columns[key][k]]), colours = data.colours.histogram;
    const error = figures.prediction_error;
    parent.append(cards(figures, [
      ["steps", number(figures.steps), "steps"],
      ["final_loss", figures.final_loss === null ? "not finite" : number(figures.final_loss, 4), "loss of the last step"],
      ["tokens_per_second", figures.tokens_per_second === null ? "none" : number(figures.tokens_per_second), "tokens/s, this process"],
      ["prediction_error", error === null ? "not known" : percent(error), "mean error of the prediction"]]));
    const mean = each > 1 ? ` A point is the mean of ${number(each)} steps.` : "";
    const ms = (value) => duration(1e6 * value), msScale = (value, low, high) => (value ? axisTime(1e6 * value, { from: 0, to: 1e6 * high }) : "0");
    const lossScale = (value, low, high) => number(value, 3, Math.max(0, Math.ceil(-Math.log10((high - low) / 4))));
    section(parent, "run", "Predicted against measured", `Time of a step by the cost model, and as the run took it.${mean}`).append(
      lineChart("Step time", [{ name: "measured", points: of("measured_ms"), colour: colours[1] },
        { name: "predicted", points: of("predicted_ms"), colour: data.colours.degrees[2], dash: "6 4" }], ms, true, msScale),
      legend([[colours[1], "measured"], [data.colours.degrees[2], "predicted (dashed)"]]));
    section(parent, "loss", "Loss", `Sum of token losses by valid tokens of the step.${mean}`)
      .append(lineChart("Loss", [{ name: "loss", points: of("loss"), colour: data.colours.degrees[2] }], (loss) => number(loss, 3), false, lossScale));
    if (columns.gap_to_bound.some((gap) => gap !== null))
      section(parent, "gap-run", "Gap to the bound", `How far the plan of every step is above the proven lower bound, as predicted.${mean}`)
        .append(lineChart("Gap to the bound", [{ name: "above the bound", points: of("gap_to_bound"), colour: colours[2] }], percent));
  }

  const place = element("div");
  main.append(element("h1", {}, data.title), ...data.notes.map((note) => element("p", { class: "note" }, note)));
  document.body.append(tip);
  if (data.run !== null) run(main, data.run);
  if (data.steps.length > 1) planners(main);
  main.append(place);
  if (data.steps.length) showStep(data.chosen, place);
  window.addEventListener("resize", () => {
    if (timeline !== null) timeline.draw();
    for (const one of document.querySelectorAll(".figure")) one.redraw();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (timeline !== null) timeline.draw(); });
}
