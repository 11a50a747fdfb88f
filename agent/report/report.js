"use strict";
/* Draws the page's charts at the width that there is, and shows values where one points. */

const three = value => Number(value.toPrecision(3));
const scaled = (value, units, digits) => {
  for (const [unit, size] of units)
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(digits)) + " " + unit;
  return null;
};
const count = value => scaled(three(value), [["G", 1e9], ["M", 1e6], ["k", 1e3]], 3) ?? String(three(value));
const percent = value => (100 * value).toFixed(value >= 0.0005 && value < 0.0995 ? 1 : 0) + " %";
const bytes = value => scaled(value, [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]], 4) ?? Math.trunc(value) + " B";
const seconds = value => {
  if (value < 60) return three(value) + " s";
  const all = Math.round(value), minutes = Math.floor(all / 60), rest = all % 60;
  if (minutes < 60) return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
  return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
};
const forms = {rows: count, share: percent, bytes, whole: value => String(three(value)), score: value => String(Number(value.toPrecision(4)))};

const STEPS = [.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
function moments(end, about) {
  const step = STEPS.find(one => end / one <= about) ?? 86400 * Math.ceil(end / 86400 / about);
  return Array.from({length: Math.floor(end / step + 1e-9) + 1}, (_, n) => n * step);
}

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text) {
  pen.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}
const escaped = text => text.replace(/[&<>"]/g, sign => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[sign]);
const read = holder => holder ? JSON.parse(holder.textContent) : null;

/* Labels that would touch are one label, "3–7"; each is [where it stands, text, first, last]. */
function joined(labels, left, right) {
  const place = one => {
    const half = widthOf(one.text) / 2, x = Math.min(Math.max(one.x, left + half), right - half);
    return {...one, shown: x, from: x - half - 3, to: x + half + 3};
  };
  const done = [];
  for (const label of labels) {
    let now = place({...label, first: label.short, last: label.short, x0: label.x, x1: label.x});
    while (done.length && done.at(-1).to > now.from) {
      const before = done.pop(), x0 = before.x0, x1 = now.x1;
      now = place({...now, x: (x0 + x1) / 2, x0, x1, first: before.first, last: now.last, tone: before.tone === now.tone ? now.tone : "",
                   text: `${before.first}–${now.last}`});
    }
    done.push(now);
  }
  return done;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.plot = figure.querySelector(".plot");
    this.data = read(figure.querySelector("script"));
    this.kind = figure.classList.contains("hero") ? "hero" : figure.classList.contains("part") ? "part" : "";
    this.marks = figure.classList.contains("unmarked") ? null : read(document.querySelector("script.moments"));
  }

  heights() {
    if (this.kind === "hero") return this.width < 560 ? [150, 90] : [220, 110];
    return this.data.panels.map(() => this.kind === "part" ? 50 : 130);
  }

  draw() {
    const {panels, end} = this.data, hero = this.kind === "hero", small = this.kind === "part";
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const heights = this.heights(), named = panels.some(panel => panel.name);
    this.left = Math.ceil(Math.max(...panels.flatMap(panel => panel.ticks.map(value => widthOf(forms[panel.form](value)))))) + 8;
    this.right = this.width - 10;
    this.x = at => this.left + (this.right - this.left) * at / end;
    const lanes = hero && this.marks ? [this.marks.bands.length && 18, this.marks.decisions.length && 18] : [0, 0];
    let top = 6 + lanes[0] + lanes[1];
    const begin = top, parts = [];
    this.panels = panels.map((panel, n) => {
      if (named) top += 20;
      const {low, high} = panel, bottom = top + heights[n];
      const one = {...panel, form: forms[panel.form], top, bottom, y: value => bottom - heights[n] * (value - low) / (high - low)};
      for (const value of panel.ticks)
        parts.push(`<line class="edge" x1="${this.left}" x2="${this.right}" y1="${one.y(value)}" y2="${one.y(value)}"/>`
          + `<text x="${this.left - 8}" y="${one.y(value) + 4}" text-anchor="end">${one.form(value)}</text>`);
      top = bottom + 16;
      return one;
    });
    this.bottom = this.panels.at(-1).bottom;
    if (this.marks && !small) parts.unshift(this.bands(begin - 4, lanes));
    if (this.marks) parts.push(this.decisions(begin - 4, lanes));
    for (const panel of this.panels) for (const one of panel.series) parts.push(this.line(panel, one));
    for (const {name, top: y} of this.panels)
      if (name) parts.push(`<text class="panel" x="${this.left}" y="${y - 7}">${escaped(name)}</text>`);
    parts.push(this.times(end), `<line class="cross" y1="${begin}" y2="${this.bottom}"/>`);
    this.plot.innerHTML = `<svg width="${this.width}" height="${this.bottom + 24}" aria-hidden="true">${parts.join("")}</svg>`;
    this.cross = this.plot.querySelector(".cross");
    this.cross.style.display = "none";
  }

  times(end) {
    let free = 0;
    return moments(end, Math.max(2, Math.floor((this.right - this.left) / 84))).map(at => {
      const text = seconds(at), half = widthOf(text) / 2, x = Math.min(this.x(at), this.width - half);
      if (x - half < free) return "";
      free = x + half + 8;
      return `<text x="${x}" y="${this.bottom + 18}" text-anchor="middle">${text}</text>`;
    }).join("");
  }

  line(panel, {style, colour, at, value, name}) {
    let points = at.map((when, n) => [this.x(when), panel.y(value[n])]);
    if (style === "level") points = [this.left, this.right].map(x => [x, points[0][1]]);
    if (style === "step") points = points.flatMap(([x, y], n) => [[x, y], [points[n + 1]?.[0] ?? this.right, y]]);
    const path = points.map(point => point.map(one => one.toFixed(1)).join(",")).join(" ");
    const floor = panel.bottom.toFixed(1), first = points[0][0].toFixed(1), last = points.at(-1)[0].toFixed(1);
    let inside = style === "dots" ? "" : `<polyline class="line" points="${path}"/>`;
    if (style === "area" || style === "step" && this.kind === "part")
      inside = `<polygon class="filled" points="${first},${floor} ${path} ${last},${floor}"/>` + inside;
    if (style === "dots" || at.length === 1 && style !== "step" && style !== "level")
      inside += points.map(([x, y]) => `<circle class="dot" cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="3.5"/>`).join("");
    if (style === "level") {
      const y = points[0][1], figure = panel.form(value[0]), text = this.width < 560 ? figure : `${name}: ${figure}`;
      inside += `<text x="${this.right - 4}" y="${y - panel.top > 20 ? y - 6 : y + 16}" text-anchor="end">${escaped(text)}</text>`;
    }
    return `<g class="c${colour} ${style}">${inside}</g>`;
  }

  bands(top, lanes) {
    const bands = this.marks.bands.filter(band => band.from <= this.data.end)
      .map(band => ({...band, x: this.x(band.from), end: this.x(Math.min(band.to, this.data.end))}));
    const drawn = bands.map(({x, end, tone}) => `<g class="band ${tone}"><rect x="${x}" y="${top}" width="${Math.max(end - x, 2)}" `
      + `height="${this.bottom - top}"/><line x1="${x}" x2="${x}" y1="${top}" y2="${this.bottom}"/></g>`);
    if (!lanes[0]) return drawn.join("");
    const labels = joined(bands.map((band, n) => {
      const room = (bands[n + 1]?.x ?? this.right) - band.x - 8, long = `${band.label} ${band.what}`;
      const text = widthOf(long) <= room ? long : band.label;
      return {...band, text, short: band.label, x: band.x + widthOf(text) / 2};
    }), this.left, this.right);
    return drawn.join("") + labels.map(one =>
      `<g class="band ${one.tone}"><text x="${one.shown}" y="12" text-anchor="middle">${escaped(one.text)}</text></g>`).join("");
  }

  decisions(top, lanes) {
    const made = this.marks.decisions.filter(one => one.at <= this.data.end).map(one => ({...one, x: this.x(one.at), text: one.label, short: one.label}));
    const drawn = made.map(({x}) => `<g class="mark${made.length > 20 ? " many" : ""}"><line x1="${x}" x2="${x}" y1="${top}" y2="${this.bottom}"/></g>`);
    if (!lanes[1]) return this.kind === "part" && made.length > 20 ? "" : drawn.join("");
    return drawn.join("") + joined(made, this.left, this.right).map(one =>
      `<g class="mark"><text x="${one.shown}" y="${lanes[0] + 12}" text-anchor="middle">${one.text}</text></g>`).join("");
  }

  /* What all series were at a moment, as rows of a tip. */
  told(at) {
    const rows = this.panels.flatMap(panel => panel.series.map(one => {
      const next = one.at.findIndex(when => when > at), before = next < 0 ? one.at.length - 1 : next - 1;
      const step = one.style === "step" || one.style === "level";
      let n = Math.max(before, 0);
      if (!step && next > 0 && one.at[next] - at < at - one.at[before]) n = next;
      if (step && before < 0 && one.style === "step") return "";
      return `<p class="c${one.colour} ${one.style}"><span><i></i>${escaped(one.name)}</span><b>${panel.form(one.value[n])}</b></p>`;
    }));
    const near = [];
    if (this.marks) {
      near.push(...this.marks.decisions.filter(one => Math.abs(this.x(one.at) - this.x(at)) < 6).slice(0, 3).map(one => one.text));
      near.push(...this.marks.bands.filter(one => this.x(one.from) - 6 < this.x(at) && this.x(at) < Math.max(this.x(one.to), this.x(one.from) + 6))
        .slice(-2).map(one => one.text));
    }
    return `<p><span>${seconds(at)}</span></p>${rows.join("")}${near.map(text => `<p class="what">${escaped(text)}</p>`).join("")}`;
  }

  at(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    return Math.min(Math.max((x - this.left) / (this.right - this.left), 0), 1) * this.data.end;
  }

  point(at, tip) {
    if (!this.cross || at > this.data.end) return this.leave();
    for (const side of ["x1", "x2"]) this.cross.setAttribute(side, this.x(at));
    this.cross.style.display = "";
    if (!tip) return;
    const box = this.plot.querySelector(".tip") ?? this.plot.appendChild(Object.assign(document.createElement("div"), {className: "tip"}));
    box.innerHTML = this.told(at);
    const x = this.x(at), beside = x + 14 + box.offsetWidth <= this.width ? x + 14 : x - 14 - box.offsetWidth;
    box.style.left = `${Math.max(0, Math.min(beside, this.width - box.offsetWidth))}px`;
  }

  leave() {
    if (this.cross) this.cross.style.display = "none";
    this.plot.querySelector(".tip")?.remove();
  }
}

/* A number and its unit stay on one line. */
function bindUnits() {
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode())
    if (walk.currentNode.parentNode.localName !== "script")
      walk.currentNode.data = walk.currentNode.data.replace(/(\d) (?=(%|[kMG]|[KMG]iB|s|min|h)\b|%)/g, "$1\u00a0");
}

let charts = [];
function drawAll() {
  bindUnits();
  charts = [...document.querySelectorAll("figure")].map(figure => new Chart(figure));
  charts.forEach(chart => chart.draw());
}
document.addEventListener("DOMContentLoaded", drawAll);
addEventListener("resize", () => charts.forEach(chart => chart.draw()));
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, event => {
  const pointed = charts.find(chart => chart.plot.contains(event.target));
  charts.forEach(chart => chart === pointed || chart.leave());
  if (!pointed?.panels) return;
  const at = pointed.at(event);
  charts.forEach(chart => chart === pointed || chart.point(at, false));
  pointed.point(at, true);
});
document.addEventListener("pointerleave", () => charts.forEach(chart => chart.leave()));
