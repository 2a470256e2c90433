// Browser side of the pages: plots, live updates while the run trains, and token colors.
"use strict";

const POLL_MS = 3000;

// The value of a color variable in the current theme.
function color(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

async function load(source) {
  // A saved report contains its data; a served page requests it.
  const kept = [...document.querySelectorAll("script[data-source]")].find((each) => each.dataset.source === source);
  if (kept) return kept.textContent;
  const answer = await fetch(source, { cache: "no-cache" });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.text();
}

// Plots

function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

function tracesOf(plot, settings) {
  const units = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];
  const longest = Math.max(0, ...plot.traces.map((trace) => (trace.seconds || [0]).at(-1)));
  const [unit, name] = units.find(([seconds]) => longest >= 2 * seconds) || units[3];
  const byTime = settings.x === "time" && plot.traces.every((trace) => trace.seconds);
  const traces = plot.traces.flatMap((trace) => {
    const shown = byTime ? { ...trace, x: trace.seconds.map((seconds) => seconds / unit) } : trace;
    if (!settings.smoothing || trace.type !== "scatter") return [shown];
    if (trace.fill) return [];
    const raw = { ...shown, mode: "lines", opacity: 0.25, showlegend: false, hoverinfo: "skip" };
    return [raw, { ...shown, mode: "lines", y: smoothed(trace.y, settings.smoothing) }];
  });
  return [traces, byTime ? `training time (${name})` : "step"];
}

function layoutOf(plot, horizontal) {
  const own = plot.layout;
  const axis = { gridcolor: color("--grid"), zerolinecolor: color("--grid"), linecolor: color("--rule"), exponentformat: "e" };
  // The axis of a few steps has no ticks between two steps.
  const steps = plot.traces.flatMap((trace) => (trace.type === "scatter" ? trace.x : []));
  const isShort = horizontal === "step" && steps.length > 0 && Math.max(...steps) - Math.min(...steps) <= 8;
  // Margins that follow the labels of a value axis may never come to rest; names of rows have to fit.
  const left = plot.wide && own.yaxis ? 8 : 56;
  return {
    hovermode: "closest", ...own, showlegend: false, height: own.height || 250,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: color("--ink") },
    hoverlabel: { namelength: -1, bgcolor: color("--paper"), bordercolor: color("--rule"), font: { color: color("--ink") } },
    margin: { l: left, r: 12, b: 42, ...own.margin, t: own.margin?.t ?? 12 },
    xaxis: { ...axis, title: { text: horizontal, font: { size: 12 } }, ...(isShort ? { dtick: 1 } : {}), ...own.xaxis }, yaxis: { ...axis, automargin: left === 8, ...own.yaxis },
  };
}

function element(name, text, ...classes) {
  const made = document.createElement(name);
  made.textContent = text;
  made.classList.add(...classes);
  return made;
}

// The legend of a plot: a button for each curve, which hides or shows the curve.
function showLegend({ plot, legend, hidden }, redraw) {
  const named = plot.traces.filter((trace) => trace.showlegend !== false && trace.name);
  const key = JSON.stringify(named.map((trace) => trace.name));
  if (!plot.layout.showlegend || legend.dataset.key === key) return;
  legend.dataset.key = key;
  legend.replaceChildren(...named.map((trace) => {
    const button = element("button", ""), swatch = element("i", ""), label = element("span", "");
    const dash = { dash: "dashed", dashdot: "dashed", dot: "dotted" }[trace.line?.dash] || "solid";
    swatch.style.borderTop = trace.line ? `3px ${dash} ${trace.line.color}` : `10px solid ${trace.marker.color}`;
    // The server escapes names, because plotly renders HTML in them.
    label.textContent = new DOMParser().parseFromString(trace.name, "text/html").documentElement.textContent;
    button.type = "button";
    button.append(swatch, label);
    button.setAttribute("aria-pressed", String(!hidden.has(trace.name)));
    button.addEventListener("click", () => {
      if (!hidden.delete(trace.name)) hidden.add(trace.name);
      button.setAttribute("aria-pressed", String(!hidden.has(trace.name)));
      redraw();
    });
    return button;
  }));
}

// Functions that draw the plots of a section again.
const redraws = [];
const redrawAll = () => redraws.forEach((redraw) => redraw());

// The list of runs is the legend of the plots above it.
const hiddenRuns = new Set(choices.read().hiddenRuns);

function markHiddenRuns() {
  for (const button of document.querySelectorAll("[data-run]")) button.setAttribute("aria-pressed", String(!hiddenRuns.has(button.dataset.run)));
}

function showOrHideRuns(event) {
  const one = event.target.closest("[data-run]"), all = event.target.closest("[data-show-runs]");
  if (!one && !all) return;
  const listed = [...document.querySelectorAll("[data-run]")].map((button) => button.dataset.run);
  if (one && !hiddenRuns.delete(one.dataset.run)) hiddenRuns.add(one.dataset.run);
  if (all) for (const run of listed) all.dataset.showRuns === "all" ? hiddenRuns.delete(run) : hiddenRuns.add(run);
  choices.write({ hiddenRuns: [...hiddenRuns] });
  markHiddenRuns();
  redrawAll();
}

function plotsOf(section) {
  const groups = section.querySelector("[data-groups]"), empty = section.querySelector("[data-empty]");
  const controls = section.querySelector("[data-controls]");
  const cards = new Map();
  const { smoothing = 0, x = "step" } = controls ? choices.read() : {};
  const settings = { search: "", smoothing, x };
  let last = null;

  const draw = (card) => {
    if (!card.visible || !card.plot) return;
    const [traces, horizontal] = tracesOf(card.plot, settings);
    const layout = layoutOf(card.plot, horizontal);
    card.target.style.minHeight = `${layout.height}px`;
    const shown = traces.map((trace) => (card.hidden.has(trace.name) || hiddenRuns.has(trace.run) ? { ...trace, visible: false } : trace));
    Plotly.react(card.target, shown, layout, { displayModeBar: false, responsive: true });
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const card = cards.get(target.dataset.key);
      if (!card || card.visible === isIntersecting) continue;
      card.visible = isIntersecting;
      draw(card);
    }
  }, { rootMargin: "300px" });

  const groupOf = (name) => {
    const known = [...groups.children].find((each) => each.dataset.group === name);
    if (known) return known.lastChild;
    const whole = element("section", "");
    whole.dataset.group = name;
    whole.append(element("h2", name, ...(name === "overview" ? ["hidden"] : [])), element("div", "", "group"));
    groups.append(whole);
    return whole.lastChild;
  };
  const cardOf = (plot) => {
    if (cards.has(plot.key)) return cards.get(plot.key);
    const figure = element("figure", "", "card", ...(plot.wide ? ["wide"] : [])), target = element("div", "", "plot");
    figure.style.margin = 0;
    const title = element("h3", plot.title), note = element("span", "", "soft");
    target.id = `plot-${plot.key}`;
    target.setAttribute("role", "img");
    target.setAttribute("aria-label", plot.title);
    figure.dataset.key = plot.key;
    title.append(" ", note);
    title.title = plot.about;
    const about = element("p", plot.description, "soft", "about"), legend = element("div", "", "curves");
    if (plot.group !== "overview" && plot.about !== plot.title) about.prepend(element("code", plot.about), " ");
    figure.append(title, ...(about.textContent ? [about] : []), legend, target);
    groupOf(plot.group).append(figure);
    cards.set(plot.key, { figure, target, note, legend, hidden: new Set(), visible: false });
    watcher.observe(figure);
    return cards.get(plot.key);
  };
  const filter = () => {
    for (const card of cards.values()) {
      card.figure.hidden = !`${card.plot.title} ${card.plot.about} ${card.plot.description}`.toLowerCase().includes(settings.search);
    }
    for (const group of groups.children) group.hidden = [...group.lastChild.children].every((figure) => figure.hidden);
    const none = [...groups.children].every((group) => group.hidden);
    if (cards.size) empty.textContent = "No metric matches the search.";
    empty.hidden = !none || !empty.textContent;
  };
  const refresh = async () => {
    const text = await load(section.dataset.plots);
    if (text === last) return;
    last = text;
    for (const plot of JSON.parse(text)) {
      const card = cardOf(plot);
      card.plot = plot;
      card.note.textContent = plot.note;
      showLegend(card, () => draw(card));
      draw(card);
    }
    filter();
  };
  if (controls) {
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.elements.smoothing.value = smoothing;
    controls.elements.x.value = x;
    controls.querySelector("output").value = smoothing.toFixed(2);
    controls.addEventListener("input", ({ target }) => {
      if (target.name === "metric") {
        const page = new URL(location);
        page.searchParams.set("metric", target.value);
        location.assign(page);
        return;
      }
      settings[target.name] = target.name === "smoothing" ? Number(target.value) : target.value.toLowerCase();
      if (target.name === "smoothing") controls.querySelector("output").value = Number(target.value).toFixed(2);
      if (target.name === "search") {
        filter();
        return;
      }
      choices.write({ [target.name]: settings[target.name] });
      cards.forEach(draw);
    });
  }
  redraws.push(() => cards.forEach(draw));
  return refresh;
}

// Parts of the page that change while the run trains

function liveOf(region) {
  toEnd(region);
  return async () => {
    const page = new DOMParser().parseFromString(await load(region.dataset.live || location.href), "text/html");
    const fresh = page.getElementById(region.id);
    if (!fresh || fresh.innerHTML === region.dataset.last) return;
    const marked = [...region.querySelectorAll("input:checked")].map((input) => input.id);
    const focused = region.contains(document.activeElement) ? document.activeElement.id : "";
    const log = region.querySelector("[data-at-end]");
    const isAtEnd = !log || log.scrollTop + log.clientHeight > log.scrollHeight - 40;
    if (region.contains(document.activeElement) && !focused && !log) return;
    region.dataset.last = fresh.innerHTML;
    region.replaceChildren(...fresh.childNodes);
    for (const id of marked) if (document.getElementById(id)) document.getElementById(id).checked = true;
    if (focused) document.getElementById(focused)?.focus();
    if (isAtEnd) toEnd(region);
    markHiddenRuns();
  };
}

function toEnd(region) {
  for (const log of region.querySelectorAll("[data-at-end]")) log.scrollTop = log.scrollHeight;
}

// Tokens

async function showTokens(section) {
  const { id, text, columns } = JSON.parse(await load(section.dataset.tokens));
  const select = section.querySelector("select"), holder = section.querySelector("[data-text]");
  const legend = section.querySelector("[data-legend]"), inspector = section.querySelector("[data-inspector]");
  const spans = text.map((each) => element("span", each));
  let current = -1;
  holder.append(...spans);
  for (const name of Object.keys(columns)) select.append(new Option(name, name));
  const shade = (share) => `rgba(${share < 0 ? "224, 120, 30" : "50, 120, 220"}, ${(0.5 * Math.min(1, Math.abs(share))).toFixed(3)})`;
  const paint = () => {
    const values = columns[select.value] || [], base = select.value === "weight version" ? Math.min(...values) : 0;
    const sizes = values.filter((value) => value !== null).map((value) => Math.abs(value - base)).sort((a, b) => a - b);
    const largest = sizes[Math.ceil(0.98 * (sizes.length - 1))] || 1;
    spans.forEach((span, place) => {
      const value = values[place];
      span.style.background = value === null || value === undefined ? "none" : shade((value - base) / largest);
    });
    const entry = (value, share) => {
      const swatch = element("i", ""), whole = element("span", "");
      swatch.style.background = shade(share);
      whole.append(swatch, shortened(value));
      return whole;
    };
    const has = (sign) => values.some((value) => value !== null && Math.sign(value - base) === sign);
    legend.replaceChildren(...(has(-1) ? [entry(base - largest, -1)] : []), entry(base, 0), ...(has(1) ? [entry(base + largest, 1)] : []));
  };
  const inspect = (place) => {
    if (place < 0 || place >= spans.length) return;
    spans[current]?.classList.remove("current");
    current = place;
    spans[place].classList.add("current");
    const rows = [["token", `${place + 1} of ${spans.length}`], ["id", id[place]], ["text", JSON.stringify(text[place])]];
    for (const [name, values] of Object.entries(columns)) rows.push([name, shortened(values[place])]);
    inspector.replaceChildren(...rows.map(([name, value]) => {
      const row = element("div", "");
      row.append(element("dt", name), element("dd", value ?? "–"));
      return row;
    }));
  };
  select.addEventListener("change", paint);
  holder.addEventListener("pointerover", (event) => inspect(spans.indexOf(event.target)));
  holder.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    inspect(Math.max(0, Math.min(spans.length - 1, current + step)));
    spans[current].scrollIntoView({ block: "nearest" });
  });
  paint();
  inspect(0);
}

function shortened(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : Math.abs(value) >= 0.001 ? value.toFixed(4) : value.toExponential(2);
}

// Copies of samples

async function copyText(event) {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const title = button.textContent;
  try {
    await navigator.clipboard.writeText(await load(button.dataset.copy));
    button.textContent = "Copied";
  } catch (error) {
    button.textContent = `Not copied: ${error.message}`;
  }
  setTimeout(() => { button.textContent = title; }, 2000);
}

// Theme

function switchTheme() {
  const chosen = document.documentElement.dataset.theme;
  const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  // The choice of the system's theme follows the system again.
  const theme = isDark ? "light" : "dark";
  const isSystems = (theme === "dark") === matchMedia("(prefers-color-scheme: dark)").matches;
  choices.write({ theme: isSystems ? null : theme });
  setTheme(isSystems ? null : theme);
  redrawAll();
}

// Keys for the links to the previous and the next sample or page

function followOnKey(event) {
  const relation = { j: "next", ArrowRight: "next", k: "prev", ArrowLeft: "prev" }[event.key];
  const isModified = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey;
  // Arrow keys scroll a focused region, and move between the tokens of a sample.
  const isUsedElsewhere = event.target.closest("input, select, textarea") || (event.key.length > 1 && event.target.closest("[tabindex='0']"));
  if (relation && !isModified && !event.defaultPrevented && !isUsedElsewhere) document.querySelector(`a[rel=${relation}]`)?.click();
  if (event.key === "/" && !isModified && !isUsedElsewhere) {
    document.querySelector("input[type=search]")?.focus();
    event.preventDefault();
  }
}

// All of a page

async function start() {
  document.addEventListener("keydown", followOnKey);
  document.addEventListener("click", showOrHideRuns);
  document.addEventListener("click", copyText);
  document.querySelector("[data-theme-button]").addEventListener("click", switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  markHiddenRuns();
  const refreshes = [...document.querySelectorAll("[data-plots]")].map(plotsOf);
  if (location.protocol !== "file:") refreshes.push(...[...document.querySelectorAll("[data-live]")].map(liveOf));
  await Promise.allSettled([...document.querySelectorAll("[data-tokens]")].map(showTokens));
  const all = () => Promise.allSettled(refreshes.map((refresh) => refresh()));
  await all();
  document.documentElement.dataset.ready = "true";
  if (!document.querySelector("[data-live]")) return;
  const again = async () => {
    if (!document.hidden) await all();
    setTimeout(again, POLL_MS);
  };
  setTimeout(again, POLL_MS);
}

start();
