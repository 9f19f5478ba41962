"use strict";
// Figures: one panel of `assay.pricing.plot` each, as SVG that follows the width and the theme.
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "clipPath", "rect"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const short = (v) => (v !== 0 && (Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3) ? v.toExponential(2)
  : v.toLocaleString("en-US", { maximumSignificantDigits: 4 }));

function ticksOf(low, high, log, wanted) {
  if (log) {
    const marks = high / low > 1e3 ? [1] : high / low > 15 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const mark of marks) found.push(mark * 10 ** power);
    const inside = found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
    if (inside.length > 2) return inside;
  }
  const rough = (high - low) / wanted, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 2.5, 5, 10].find((f) => f * unit >= rough) || 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function axis(values, log, pixels) {
  let low = Math.min(...values), high = Math.max(...values);
  if (!(high > low)) { low = log ? low / 1.5 : low - 1; high = log ? high * 1.5 : high + 1; }
  const to = log ? Math.log : (v) => v, pad = 0.04 * (to(high) - to(low));
  const start = to(low) - pad, span = to(high) - to(low) + 2 * pad;
  const back = log ? Math.exp : (v) => v;
  const at = (v) => pixels[0] + (pixels[1] - pixels[0]) * (to(v) - start) / span;
  return { at, ticks: ticksOf(back(start), back(start + span), log, (pixels[1] > pixels[0] ? 1 / 70 : -1 / 45) * (pixels[1] - pixels[0])) };
}

function chart(host, panel) {
  const hidden = (host.hiddenNames ??= new Set());
  const ownerOf = (series) => series.name || (panel.series.find((s) => s.name && s.colour === series.colour) || {}).name;
  const width = Math.max(host.clientWidth, 200), height = Math.round(Math.min(380, 160 + 0.35 * width));
  const box = { left: 52, right: width - 8, top: 8, bottom: height - 42 };
  const shown = panel.series.filter((series) => !hidden.has(ownerOf(series)));
  const known = (v, log) => v !== null && v !== undefined && (!log || v > 0);
  const points = (series) => series.x.map((x, i) => ({
    x, y: series.y[i], low: series.low[i], high: series.high[i], series,
  })).filter((p) => known(p.x, panel.log_x) && known(p.y, panel.log_y));
  const all = shown.flatMap(points);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
    "aria-label": `${panel.title}: ${panel.y_label} against ${panel.x_label}. Arrow keys read the points.` });
  const tip = make("div", { class: "tip", role: "status", hidden: "" });
  if (all.length) {
    const x = axis(all.map((p) => p.x), panel.log_x, [box.left, box.right]);
    const y = axis(all.flatMap((p) => [p.y, p.low, p.high]).filter((v) => known(v, panel.log_y)), panel.log_y, [box.bottom, box.top]);
    for (const tick of y.ticks) {
      svg.append(make("line", { class: "grid-line", x1: box.left, x2: box.right, y1: y.at(tick), y2: y.at(tick) }));
      svg.append(make("text", { x: box.left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    let lastLabel = -Infinity;
    for (const tick of x.ticks) {
      svg.append(make("line", { class: "grid-line", x1: x.at(tick), x2: x.at(tick), y1: box.bottom, y2: box.bottom + 5 }));
      const half = 4 * short(tick).length;
      if (x.at(tick) - half < lastLabel) continue;
      svg.append(make("text", { x: x.at(tick), y: box.bottom + 19, "text-anchor": "middle" }, short(tick)));
      lastLabel = x.at(tick) + half + 6;
    }
    svg.append(make("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, panel.x_label));
    svg.append(make("text", { x: -(box.top + box.bottom) / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, panel.y_label));
    const path = (list, key) => list.map((p, i) => `${i ? "L" : "M"}${x.at(p.x).toFixed(1)} ${y.at(p[key]).toFixed(1)}`).join("");
    for (const series of shown) {
      const group = make("g", { class: `c${series.colour}` }), list = points(series);
      if (series.kind === "line" || series.kind === "dashed") group.append(make("path", {
        d: path(list, "y"), fill: "none", stroke: "currentColor", "stroke-width": series.width, "stroke-dasharray": series.kind === "dashed" ? "5 4" : "none",
      }));
      if (series.kind === "band") {
        const whole = list.filter((p) => known(p.low, panel.log_y) && known(p.high, panel.log_y));
        if (whole.length) group.append(make("path", { d: path(whole, "low") + path(whole.reverse(), "high").replace("M", "L") + "Z", fill: "currentColor", opacity: 0.16 }));
      }
      if (series.kind === "points" || series.kind === "bars") for (const p of list) {
        const [cx, cy] = [x.at(p.x), y.at(p.y)];
        if (known(p.low, panel.log_y) && known(p.high, panel.log_y))
          group.append(make("line", { x1: cx, x2: cx, y1: y.at(p.low), y2: y.at(p.high), stroke: "currentColor", "stroke-width": series.width, "stroke-linecap": "round" }));
        group.append(make("circle", { cx, cy, r: 4, fill: "currentColor" }));
      }
      svg.append(group);
    }
    const marked = all.filter((p) => p.series.kind === "points" || p.series.kind === "bars");
    const stops = marked.length ? marked : all.filter((p) => p.series.kind === "line");
    const ring = make("circle", { r: 7, fill: "none", stroke: "currentColor", "stroke-width": 2, visibility: "hidden" });
    svg.append(ring);
    let current = -1;
    const tell = (i) => {
      current = i;
      const p = stops[i], ends = known(p.low) && p.low !== p.high ? ` (${short(p.low)} to ${short(p.high)})` : "";
      tip.textContent = `${ownerOf(p.series) || panel.title}: ${panel.y_label} ${short(p.y)}${ends} at ${panel.x_label} ${short(p.x)}`;
      tip.hidden = false;
      const [px, py] = [x.at(p.x), y.at(p.y)];
      tip.style.left = `${Math.min(Math.max(px - 80, 0), Math.max(0, width - tip.offsetWidth))}px`;
      tip.style.top = `${svg.offsetTop + (py > tip.offsetHeight + 14 ? py - tip.offsetHeight - 12 : py + 14)}px`;
      for (const [name, value] of [["cx", px], ["cy", py], ["visibility", "visible"]]) ring.setAttribute(name, value);
    };
    const hush = () => { tip.hidden = true; ring.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect(), [mx, my] = [event.clientX - frame.left, event.clientY - frame.top];
      const far = stops.map((p) => Math.hypot(x.at(p.x) - mx, y.at(p.y) - my)), nearest = far.indexOf(Math.min(...far));
      if (far[nearest] < 60) tell(nearest); else hush();
    });
    svg.addEventListener("pointerleave", hush);
    svg.addEventListener("blur", hush);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hush();
      if (!step) return;
      event.preventDefault();
      tell((current + step + stops.length) % stops.length);
    });
  }
  const legend = make("div", { class: "legend" });
  for (const series of panel.series) {
    if (!series.name) continue;
    const button = make("button", { type: "button", "aria-pressed": String(!hidden.has(series.name)) },
      make("i", { class: `c${series.colour}` }), series.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(series.name)) hidden.add(series.name);
      const place = [...legend.children].indexOf(button);
      chart(host, panel);
      host.querySelectorAll(".legend button")[place].focus();
    });
    legend.append(button);
  }
  const save = make("a", { class: "save", href: "#", download: `${panel.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.svg` }, "Save this figure (SVG)");
  save.addEventListener("click", () => { save.href = svgFile(svg, shown.filter((series) => series.name)); });
  host.replaceChildren(legend, svg, tip, save);
}

// A figure as a file of its own: colours and fonts are written into it, and the legend stands below the axes.
function svgFile(svg, named) {
  const copy = svg.cloneNode(true), theme = getComputedStyle(document.documentElement), { width, height } = svg.viewBox.baseVal;
  const originals = [...svg.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((element, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "font-size", "visibility"])
      element.setAttribute(name, style.getPropertyValue(name));
  });
  const total = height + 12 + 18 * named.length;
  for (const [name, value] of Object.entries({ xmlns: SVG, width, height: total, viewBox: `0 0 ${width} ${total}`, "font-family": "sans-serif" })) copy.setAttribute(name, value);
  copy.prepend(make("rect", { width, height: total, fill: theme.getPropertyValue("--card").trim() }));
  named.forEach((series, i) => copy.append(
    make("circle", { cx: 60, cy: height + 14 + 18 * i, r: 5, fill: theme.getPropertyValue(`--c${series.colour}`).trim() }),
    make("text", { x: 72, y: height + 18 + 18 * i, "font-size": 12, fill: theme.getPropertyValue("--ink").trim() }, series.name)));
  return `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}

// The planner: `assay.pricing.plan` once more. FD is convex in the money spent on clean images.
class Planner {
  constructor(law) { Object.assign(this, law.parameters); this.law = law; }
  price(sigma) { return (1 + (sigma / this.sigma_floor) ** 2) ** -this.steepness; }
  order(market) {
    const worth = (i) => this.price(market.noisy[i].sigma) / market.noisy[i].unit_price;
    return market.noisy.map((_, i) => i).sort((a, b) => worth(b) - worth(a));
  }
  spend(market, budget, onClean) {
    const counts = [onClean / market.clean.unit_price, ...market.noisy.map(() => 0)];
    let money = budget - onClean;
    for (const i of this.order(market)) {
      const offer = market.noisy[i], allOfIt = money >= offer.max_images * offer.unit_price - 1e-12 * budget;
      counts[1 + i] = allOfIt ? offer.max_images : money / offer.unit_price;
      money -= counts[1 + i] * offer.unit_price;
      if (money <= 1e-12 * budget) break;
    }
    return counts;
  }
  sizes(market, counts) {
    const clean = market.have_clean + counts[0];
    return [clean, market.noisy.reduce((sum, offer, i) => sum + this.price(offer.sigma) * counts[1 + i], clean)];
  }
  value(market, counts) {
    const [clean, size] = this.sizes(market, counts).map((n) => n / this.num_images);
    return clean > 0 ? this.floor + this.amplitude * size ** -this.exponent + this.details / clean : Infinity;
  }
  gains(market, counts) {
    const [clean, size] = this.sizes(market, counts).map((n) => n / this.num_images);
    const bySize = this.exponent * this.amplitude * size ** (-this.exponent - 1) / this.num_images;
    return [this.details / clean ** 2 / this.num_images + bySize, ...market.noisy.map((offer) => this.price(offer.sigma) * bySize)];
  }
  solve(market, budget) {
    const ends = [0, Math.min(budget, market.clean.max_images * market.clean.unit_price)];
    let left = budget;
    for (const i of this.order(market)) {
      left -= market.noisy[i].max_images * market.noisy[i].unit_price;
      if (left > 0 && left < ends[1]) ends.push(left);
    }
    const pieces = [...new Set(ends)].sort((a, b) => a - b);
    const tried = pieces.map((end) => this.spend(market, budget, end));
    for (let piece = 0; piece + 1 < pieces.length; piece++) {
      let [low, high] = pieces.slice(piece, piece + 2);
      const middle = this.spend(market, budget, (low + high) / 2);
      const inside = market.noisy.map((_, i) => i).filter((i) => middle[1 + i] > 0 && middle[1 + i] < market.noisy[i].max_images);
      const slope = (onClean) => {
        const gains = this.gains(market, this.spend(market, budget, onClean));
        return gains[0] / market.clean.unit_price - Math.max(0, ...inside.map((i) => gains[1 + i] / market.noisy[i].unit_price));
      };
      if (market.have_clean === 0) low = Math.max(low, 1e-12 * high);
      if (!(slope(low) > 0 && slope(high) < 0)) continue;
      for (let i = 0; i < 200 && high > low; i++) {
        const half = (low + high) / 2;
        if (half === low || half === high) break;
        if (slope(half) > 0) low = half; else high = half;
      }
      tried.push(this.spend(market, budget, low));
    }
    return tried.reduce((best, counts) => (this.value(market, counts) < this.value(market, best) ? counts : best));
  }
  breakEven(market, budget, which) {
    const none = (offer) => ({ ...offer, max_images: 0 });
    const without = { ...market, clean: which ? market.clean : none(market.clean), noisy: market.noisy.map((offer, i) => (i + 1 === which ? none(offer) : offer)) };
    const counts = this.solve(without, budget);
    if (counts[0] + market.have_clean <= 0) return Infinity;
    const gains = this.gains(without, counts), offers = [without.clean, ...without.noisy];
    const best = Math.max(0, ...offers.map((offer, i) => (counts[i] < offer.max_images ? gains[i] / offer.unit_price : 0)));
    return best > 0 ? gains[which] / best : Infinity;
  }
  predict(market, counts) {
    const [clean, size] = this.sizes(market, counts), names = ["floor", "amplitude", "exponent", "sigma_floor", "steepness", "details"];
    const values = this.law.draws.map((draw, r) => {
      const other = Object.assign(Object.create(Planner.prototype), this, Object.fromEntries(names.map((name, i) => [name, draw[i]])));
      return other.value(market, counts) * Math.exp(this.law.scatter[r]);
    }).sort((a, b) => a - b);
    const noise = Math.max(0, ...market.noisy.filter((_, i) => counts[1 + i] > 0).map((offer) => offer.sigma));
    const outside = Object.entries(this.law.seen).map(([name, [low, high]], i) => {
      const value = [clean, size, noise][i];
      if (value >= low - 1e-9 * high && value <= high * (1 + 1e-9)) return "";
      return `${name} ${short(value)} ${value < low ? "below" : "above"} the table's ${short(value < low ? low : high)}`;
    }).filter(Boolean);
    return { value: this.value(market, counts), low: values[this.law.ranks[0]], high: values[this.law.ranks[1]], outside };
  }
}

let numFields = 0;
function field(label, value, low, high, changed, optional = false) {
  // A number with a slider beside it, which moves in its logarithm; a field may be optional and then empty.
  const id = `field-${++numFields}`, toSlider = (v) => 1000 * Math.log(v / low) / Math.log(high / low);
  const number = make("input", { type: "number", id, min: optional ? 0 : low / 1000, step: "any", value: value ?? "", placeholder: optional ? "any" : "" });
  if (!optional) number.required = true;
  const slider = make("input", { type: "range", min: 0, max: 1000, step: 1, value: toSlider(value || high), "aria-label": label });
  const speak = () => slider.setAttribute("aria-valuetext", number.value);
  slider.addEventListener("input", () => {
    number.value = Number((low * (high / low) ** (slider.value / 1000)).toPrecision(3));
    speak(); changed();
  });
  number.addEventListener("input", () => { if (number.value > 0) slider.value = toSlider(number.value); speak(); changed(); });
  speak();
  const element = make("div", { class: "field" }, make("div", { class: "row" }, make("label", { for: id }, label), number), ...(optional ? [] : [slider]));
  return { element, number, valid: () => number.validity.valid, get: () => (number.value === "" ? null : Number(number.value)) };
}

const count = (v) => Math.round(v).toLocaleString("en-US");
const money = (v) => (Number.isFinite(v) ? v.toLocaleString("en-US", { maximumSignificantDigits: 3 }) : "any price");
const exact = (v, text, name) => make("data", { value: v, "data-name": name }, text);

function sheet(header, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": header.join(", ") }, make("table", {}, make("thead", {}, line(header, "th")), make("tbody", {}, ...rows.map((row) => line(row, "td")))));
}

function startPlanner(article, data) {
  const planner = new Planner(data.law), total = planner.num_images, find = (selector) => article.querySelector(selector);
  const changed = () => update();
  const round = (v) => Number(v.toPrecision(2));
  const budget = field("Budget", round(0.2 * total), round(0.002 * total), round(10 * total), changed);
  const clean = field("Price of a clean image", 1, 0.01, 100, changed);
  const have = field("Clean images at hand", Math.round(data.law.seen["clean images"][0]), 1, total, changed, true);
  const offers = data.law.sigmas.map(([sigma, worth]) => ({
    sigma, price: field("Price of an image", round(0.8 * worth ** 2), 0.001, 10, changed), most: field("At most", round(total / 3), 1, total, changed, true),
    wanted: make("input", { type: "checkbox", checked: "", "aria-label": `Noise ${sigma} is on offer` }),
  }));
  find(".fields").append(budget.element, clean.element, have.element, ...offers.map((offer) => {
    offer.wanted.addEventListener("change", changed);
    return make("fieldset", {}, make("legend", {}, make("label", {}, offer.wanted, ` Noisy images at ${offer.sigma}`)), offer.price.element, offer.most.element);
  }));
  const answer = find(".answer"), said = find("[role=status]");
  function update() {
    const used = offers.filter((offer) => offer.wanted.checked);
    const fields = [budget, clean, have, ...used.flatMap((offer) => [offer.price, offer.most])];
    const market = {
      clean: { sigma: 0, unit_price: clean.get(), max_images: Infinity }, have_clean: have.get() ?? 0,
      noisy: used.map((offer) => ({ sigma: offer.sigma, unit_price: offer.price.get(), max_images: offer.most.get() ?? Infinity })),
    };
    if (!fields.every((each) => each.valid())) {
      said.textContent = "Budget and prices are numbers above 0, counts at least 0.";
      answer.replaceChildren();
      return;
    }
    const spend = budget.get(), counts = planner.solve(market, spend), guess = planner.predict(market, counts);
    const kinds = [market.clean, ...market.noisy];
    const words = kinds.map((offer, i) => `${count(counts[i])} ${offer.sigma ? `noisy ones at ${offer.sigma}` : "clean images"}`)
      .filter((_, i) => counts[i] >= 0.5).join(" and ");
    const onlyClean = { ...market, noisy: [] }, alone = planner.value(onlyClean, planner.spend(onlyClean, spend, spend));
    said.textContent = `Buy ${words || "nothing"} for a predicted ${data.metric} of`;
    answer.replaceChildren(
      make("p", {}, make("b", { class: "big" }, exact(guess.value, guess.value.toFixed(3), "value"))),
      make("p", {}, `${100 * planner.law.confidence}% of runs between `, exact(guess.low, guess.low.toFixed(3), "low"), " and ",
        exact(guess.high, guess.high.toFixed(3), "high"), `; all the money in clean images: ${alone.toFixed(3)}.`),
      sheet(["kind", "buy", "cost", "worth buying up to"], kinds.map((offer, i) => [
        offer.sigma ? `noise ${offer.sigma}` : "clean", exact(counts[i], count(counts[i]), `buy-${offer.sigma}`), money(counts[i] * offer.unit_price),
        ((v) => exact(v, money(v), `break-even-${offer.sigma}`))(planner.breakEven(market, spend, i)),
      ])),
      ...(guess.outside.length ? [make("p", { class: "warn" }, `This is an extrapolation: ${guess.outside.join("; ")}.`)] : []));
    find(".command").textContent = [data.command, `--budget ${budget.number.value}`, `--clean-price ${clean.number.value}`,
      ...used.map((offer) => `--noisy-price ${offer.price.number.value}@${offer.sigma}`),
      ...used.filter((offer) => offer.most.get() !== null).map((offer) => `--max-noisy ${offer.most.number.value}@${offer.sigma}`),
      ...(have.get() ? [`--have-clean ${have.number.value}`] : [])].join(" ");
    const part = [...Array(121).keys()].map((i) => (i < 30 ? 0.001 * 50 ** (i / 30) : 0.05 + 0.95 * (i - 30) / 90));
    const lines = used.map((offer, i) => [`with noise ${offer.sigma}`, 1 + data.law.sigmas.findIndex(([sigma]) => sigma === offer.sigma), [market.noisy[i]]]);
    if (lines.length > 1 && market.noisy.some((offer) => offer.max_images < Infinity)) lines.push(["with all of them", 6, market.noisy]);
    chart(find("[data-budget]"), {
      title: "Along the budget", x_label: "part of the budget for clean images, %", y_label: `predicted ${data.metric}`, log_x: false, log_y: true,
      series: [...(lines.length ? lines : [["clean only", 0, []]]).map(([name, colour, noisy]) => ({
        name, kind: "line", colour: colour % 7, width: 2, low: [], high: [], x: part.map((p) => 100 * p),
        y: part.map((p) => ((only) => planner.value(only, planner.spend(only, spend, spend * p)))({ ...market, noisy })),
      })), { name: "the plan", kind: "bars", colour: 0, width: 2, x: [100 * counts[0] * market.clean.unit_price / spend], y: [guess.value], low: [guess.low], high: [guess.high] }],
    });
  }
  find("form").addEventListener("submit", (event) => event.preventDefault());
  return update;
}

function startWorth(article, data) {
  // Without a law: what the bounds alone say about a price.
  const update = () => {
    const price = clean.get();
    article.querySelector(".answer").replaceChildren(price > 0 ? sheet(["noise", "worth buying below", "too expensive above"], data.bounds.map((b) => [
      `${b.sigma}`, b.low > 0 ? exact(b.low * price, money(b.low * price), `below-${b.sigma}`) : "not known", exact(b.high * price, money(b.high * price), `above-${b.sigma}`),
    ])) : make("p", { class: "warn" }, "A price is a number above 0."));
  };
  const clean = field("Price of a clean image", 1, 0.01, 100, update);
  article.querySelector(".fields").append(clean.element);
  article.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  return update;
}

for (const article of document.querySelectorAll("article")) {
  const data = JSON.parse(article.querySelector(".data").textContent);
  const draw = [...article.querySelectorAll("[data-panel]")].map((host) => () => chart(host, data.panels[host.dataset.panel]));
  if (data.law) draw.push(startPlanner(article, data));
  else if (article.querySelector("[data-worth]")) draw.push(startWorth(article, data));
  let width = 0;
  new ResizeObserver(() => {
    if (article.clientWidth === width) return;
    width = article.clientWidth;
    for (const each of draw) each();
  }).observe(article);
}
