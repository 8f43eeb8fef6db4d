"use strict";
(() => {
  const data = JSON.parse(document.getElementById("heat-data").textContent);
  const table = document.getElementById("heat-table");
  if (!table) return;
  const byId = (id) => document.getElementById(id);
  const body = table.tBodies[0];
  const footCells = table.tFoot.rows[0].cells;
  const canvas = byId("heat-canvas");
  const slow = new Set(data.slow.map(([i, j]) => i * data.phases.length + j));
  const slowNodes = new Set(data.slow.map(([i]) => i));
  const LINE_PX = 14; // the style sheet's line height of the overview's labels
  const names = new Intl.Collator("en", { numeric: true });
  const state = { metric: "own", sort: "excess", down: true, page: 0, order: [], active: 0 };

  // The same words as in the rest of the page.
  const seconds = (exact) => {
    let value = exact;
    if (value === null) return "-";
    value += 1e-9;
    if (value < 0.0005) return "0s";
    if (value < 0.0995) return `${(value * 1000).toFixed(0)}ms`;
    if (value < 9.95) return `${value.toFixed(2)}s`;
    if (value < 99.95) return `${value.toFixed(1)}s`;
    const whole = Math.round(value);
    if (whole < 3600) return `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s`;
    const minutes = Math.round(value / 60);
    const hours = Math.floor(minutes / 60);
    if (hours >= 100) return `${hours.toLocaleString("en")}h`;
    return `${hours}h${String(minutes % 60).padStart(2, "0")}m`;
  };

  const shade = (value, median) => {
    if (value === null || median === null || value <= median) return 0;
    const factor = median > 0 ? value / median : Infinity;
    const level = [1.1, 1.25, 1.5, 2, 4].filter((bound) => factor >= bound).length;
    return value - median < data.whole * 0.01 ? Math.min(level, 1) : level;
  };

  const rows = () => data[state.metric];
  const medians = () => data.medians[state.metric];
  const isSlow = (i, j) => state.metric === "own" && slow.has(i * data.phases.length + j);
  const excess = (i) =>
    rows()[i].reduce((sum, v, j) => sum + (v === null ? 0 : Math.max(0, v - (medians()[j] ?? 0))), 0);

  const reorder = () => {
    const wanted = byId("heat-filter").value.trim().toLowerCase();
    const onlySlow = byId("heat-slow").checked;
    state.order = data.nodes.map((_, i) => i).filter(
      (i) => (!onlySlow || slowNodes.has(i)) && data.nodes[i].toLowerCase().includes(wanted),
    );
    const sign = state.down ? -1 : 1;
    if (state.sort === "name") {
      state.order.sort((a, b) => sign * names.compare(data.nodes[a], data.nodes[b]));
    } else {
      const keys = data.nodes.map((_, i) => (state.sort === "excess" ? excess(i) : rows()[i][state.sort]));
      // What was not observed stands last, whichever way the rest is sorted.
      state.order.sort((a, b) => (keys[a] === null) - (keys[b] === null) || sign * (keys[a] - keys[b]) || a - b);
    }
  };

  const cell = (name, text, css) => {
    const element = document.createElement(name);
    element.textContent = text;
    if (css) element.className = css;
    return element;
  };

  // A name that may break after its separators, as in the rest of the page.
  const breakable = (name) => {
    if (name.length <= 24) return cell("span", name, "name short");
    const span = cell("span", "", name.length > 40 ? "name long" : "name");
    name.split(/(?<=[-._/:])/).forEach((part, k) => {
      if (k) span.append(document.createElement("wbr"));
      span.append(part);
    });
    return span;
  };

  const rowOf = (i, position) => {
    const row = document.createElement("tr");
    row.dataset.node = i;
    row.tabIndex = position === state.active ? 0 : -1;
    const head = cell("th", "");
    head.scope = "row";
    head.append(breakable(data.nodes[i]));
    row.append(head, cell("td", seconds(excess(i)), "n"));
    rows()[i].forEach((value, j) => {
      const td = cell("td", seconds(value), `n h${shade(value, medians()[j])}`);
      td.hidden = medians()[j] === null;
      if (isSlow(i, j)) {
        td.append(" \u25b2", cell("span", " straggler", "sr"));
      }
      row.append(td);
    });
    return row;
  };

  const draw = () => {
    const pages = Math.max(1, Math.ceil(state.order.length / data.page));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const first = state.page * data.page;
    const shown = state.order.slice(first, first + data.page);
    state.active = Math.min(state.active, Math.max(0, shown.length - 1));
    body.replaceChildren(...shown.map(rowOf));
    medians().forEach((median, j) => {
      footCells[j + 2].textContent = seconds(median);
      // A phase that nobody spent this kind of time in only costs room.
      footCells[j + 2].hidden = table.tHead.rows[0].cells[j + 2].hidden = median === null;
    });
    const last = first + shown.length;
    const total = data.nodes.length.toLocaleString("en");
    byId("heat-status").textContent = `${state.order.length.toLocaleString("en")} of ${total} nodes`;
    byId("heat-range").textContent = shown.length ? `${first + 1} to ${last}` : "none";
    byId("heat-previous").disabled = state.page === 0;
    byId("heat-next").disabled = state.page >= pages - 1;
    byId("heat-caption").textContent =
      `${state.metric === "own" ? "Own work" : "Waiting"} by node and phase`;
    for (const th of table.tHead.rows[0].cells) {
      if (th.dataset.sort === String(state.sort)) {
        th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      } else {
        th.removeAttribute("aria-sort");
      }
    }
    paint();
  };

  const paint = () => {
    if (!canvas) return;
    const width = canvas.clientWidth;
    if (!width) return;
    const line = LINE_PX;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(line * data.phases.length * scale);
    canvas.style.height = `${line * data.phases.length}px`;
    const style = getComputedStyle(document.documentElement);
    const colours = [0, 1, 2, 3, 4, 5].map((level) => style.getPropertyValue(`--h${level}`).trim());
    const context = canvas.getContext("2d");
    context.fillStyle = colours[0];
    context.fillRect(0, 0, canvas.width, canvas.height);
    const count = state.order.length;
    if (!count) return;
    const columns = Math.min(count, canvas.width);
    for (let x = 0; x < columns; x += 1) {
      const from = Math.floor((x * count) / columns);
      const to = Math.max(from + 1, Math.floor(((x + 1) * count) / columns));
      const left = Math.floor((x * canvas.width) / columns);
      const right = Math.floor(((x + 1) * canvas.width) / columns);
      data.phases.forEach((_, j) => {
        let level = 0;
        for (let k = from; k < to; k += 1) {
          level = Math.max(level, shade(rows()[state.order[k]][j], medians()[j]));
        }
        if (level) {
          context.fillStyle = colours[level];
          context.fillRect(left, Math.round(j * line * scale), right - left, Math.ceil(line * scale) - 1);
        }
      });
    }
  };

  const describe = (row) => {
    const i = Number(row.dataset.node);
    for (const other of body.rows) other.removeAttribute("aria-current");
    row.setAttribute("aria-current", "true");
    const above = rows()[i]
      .map((value, j) => ({ value, j, median: medians()[j] ?? 0 }))
      .filter((item) => item.value !== null && item.value > item.median)
      .sort((a, b) => b.value - b.median - (a.value - a.median))
      .slice(0, 4)
      .map(({ value, j, median }) => {
        const factor = median > 0 ? `, ${(value / median).toFixed(2)}x the median` : "";
        return `${data.phases[j]} ${seconds(value)}${factor}${isSlow(i, j) ? " (straggler)" : ""}`;
      });
    byId("heat-detail").textContent =
      `${data.nodes[i]}: ${above.length ? above.join("; ") : "nowhere above the median"}.`;
  };

  const focusRow = (position) => {
    const shown = body.rows.length;
    if (position < 0 && state.page > 0) {
      state.page -= 1;
      state.active = data.page - 1;
      draw();
    } else if (position >= shown && (state.page + 1) * data.page < state.order.length) {
      state.page += 1;
      state.active = 0;
      draw();
    } else {
      state.active = Math.min(Math.max(0, position), shown - 1);
      for (const [k, row] of [...body.rows].entries()) row.tabIndex = k === state.active ? 0 : -1;
    }
    body.rows[state.active]?.focus();
  };

  const restart = () => {
    state.page = 0;
    state.active = 0;
    reorder();
    draw();
  };

  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const at = [...body.rows].indexOf(row);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: body.rows.length - 1 };
    if (event.key in moves) {
      event.preventDefault();
      focusRow(moves[event.key]);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      describe(row);
    }
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) describe(row);
  });

  for (const th of table.tHead.rows[0].cells) {
    const button = cell("button", "");
    button.type = "button";
    button.append(...th.childNodes);
    button.addEventListener("click", () => {
      const key = th.dataset.sort;
      const wanted = key === "name" || key === "excess" ? key : Number(key);
      state.down = state.sort === wanted ? !state.down : wanted !== "name";
      state.sort = wanted;
      restart();
    });
    th.replaceChildren(button);
  }

  byId("heat-filter").addEventListener("input", restart);
  byId("heat-slow").addEventListener("change", restart);
  byId("heat-metric").addEventListener("change", (event) => {
    state.metric = event.target.value;
    restart();
  });
  byId("heat-previous").addEventListener("click", () => { state.page -= 1; state.active = 0; draw(); });
  byId("heat-next").addEventListener("click", () => { state.page += 1; state.active = 0; draw(); });

  for (const element of document.querySelectorAll(".js")) element.hidden = false;
  if (data.nodes.length <= data.page) document.querySelector(".pager").hidden = true;

  if (canvas) {
    canvas.addEventListener("click", (event) => {
      const position = Math.floor((event.offsetX / canvas.clientWidth) * state.order.length);
      state.page = Math.floor(position / data.page);
      state.active = position % data.page;
      draw();
      const row = body.rows[state.active];
      if (row) { row.focus(); describe(row); }
    });
    new ResizeObserver(paint).observe(canvas.parentElement);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  }
  restart();
})();
