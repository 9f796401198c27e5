(() => {
  "use strict";
  const grid = document.querySelector(".maps");
  const dialog = document.getElementById("map");
  if (!grid || !dialog || !dialog.showModal) return;
  const data = JSON.parse(document.getElementById("maps-data").textContent);
  const find = (id) => document.getElementById(id);
  const [scroll, plane, keys, queries] = ["scroll", "plane", "keys", "queries"].map((n) => dialog.querySelector(".map-" + n));
  const [across, down] = dialog.querySelectorAll(".map-line");
  const canvas = plane.querySelector("canvas");
  const rows = [...grid.querySelectorAll("[role=row]")].map((row) => [...row.querySelectorAll(".tile")]);
  const heads = rows.flatMap((tiles, layer) => tiles.map((tile, at) => ({ tile, layer, at })));
  // Colours as a canvas stores them: alpha, blue, green, red from the high byte down.
  const colour = (hex) => (0xff000000 | parseInt(hex.slice(4) + hex.slice(2, 4) + hex.slice(0, 2), 16)) >>> 0;
  const ramps = Object.fromEntries(Object.entries(data.ramps).map(([name, hex]) => [name, hex.match(/.{6}/g).map(colour)]));
  let current = null;
  let wanted = null;

  document.documentElement.classList.add("live");

  // One stop for the Tab key; arrows move inside the grid.
  let stop = heads[0];
  const moveTo = (head, focus) => {
    stop.tile.tabIndex = -1;
    stop = head;
    stop.tile.tabIndex = 0;
    if (focus) stop.tile.focus();
  };
  heads.forEach((head) => (head.tile.tabIndex = -1));
  moveTo(stop, false);
  const at = (layer, place) => {
    const row = rows[Math.min(Math.max(layer, 0), rows.length - 1)];
    const tile = row[Math.min(Math.max(place, 0), row.length - 1)];
    return heads.find((head) => head.tile === tile);
  };
  grid.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6] };
    const step = steps[event.key];
    if (!step || event.altKey || event.metaKey) return;
    event.preventDefault();
    const far = event.ctrlKey ? Math.sign(step[1]) * 1e6 : 0;
    moveTo(at(stop.layer + step[0] + far, stop.at + step[1]), true);
  });
  grid.addEventListener("click", (event) => {
    const tile = event.target.closest(".tile");
    if (tile) open(heads.find((head) => head.tile === tile));
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-query]");
    const head = link && heads.find((one) => "#" + one.tile.id === link.hash);
    if (!head) return;
    event.preventDefault();
    moveTo(head, false);
    open(head, +link.dataset.query, +link.dataset.key, link);
  });

  // The words of the legend pick heads out.
  document.querySelectorAll(".words > li").forEach((item) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(...item.childNodes);
    item.classList.add("picks");
    item.append(button);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") === "true";
      document.querySelectorAll(".words button").forEach((other) => other.setAttribute("aria-pressed", "false"));
      button.setAttribute("aria-pressed", String(!on));
      heads.forEach(({ tile }) => tile.classList.toggle("aside", !on && !tile.dataset.words.split("|").includes(item.dataset.word)));
    });
  });

  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  async function open(head, query, key, from) {
    const layer = data.layers[head.layer];
    const about = layer.heads[head.at];
    wanted = head;
    const cells = await inflate(find(head.tile.id.replace("head", "map")).textContent);
    // Another head may have been asked for in the meantime.
    if (wanted !== head) return;
    const [height, width] = about.shape;
    const same = current && current.height === height && current.width === width && dialog.open;
    moveTo(head, false);
    current = {
      head, about, cells, height, width, from: from || head.tile,
      queries: data.labels[layer.queries], keys: data.labels[layer.keys],
      row: same ? current.row : Math.floor((query ?? head.tile.dataset.query) / data.factor),
      column: same ? current.column : Math.floor((key ?? head.tile.dataset.key) / data.factor),
      cell: same ? current.cell : 0,
    };
    const [title, ...told] = head.tile.getAttribute("aria-label").split(": ");
    find("map-title").textContent = title;
    find("map-told").textContent = told.join(": ");
    paint();
    if (!dialog.open) dialog.showModal();
    rowText();
    zoom(current.cell || fitting());
    if (!same) plane.focus({ preventScroll: true });
  }

  function weight(row, column) {
    const { cells, width, about } = current;
    const level = cells[row * width + column];
    const root = about.signed ? (level - 128) / 127 : level / 255;
    return Math.sign(root) * root * root * about.scale;
  }

  function paint() {
    const { width, height, cells, about } = current;
    canvas.width = width;
    canvas.height = height;
    const ramp = ramps[about.signed ? "two" : "one"];
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < cells.length; i++) pixels[i] = ramp[cells[i]];
    canvas.getContext("2d").putImageData(image, 0, 0);
    const top = figure(about.scale);
    find("map-row").className = about.signed ? "two" : "one";
    dialog.querySelector(".scale").className = "scale ramp " + (about.signed ? "two" : "one");
    const ends = about.signed ? ["\u2212" + top, "0", top] : ["0", figure(about.scale / 4), top];
    find("map-ends").replaceChildren(...ends.map((text) => element("span", text)));
  }

  const figure = (value) => (Math.abs(value) >= 0.001 || value === 0 ? String(+value.toPrecision(3)) : value.toExponential(1)).replace("-", "\u2212");
  const element = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const named = (labels, place) => {
    const last = Math.min((place + 1) * data.factor, labels.length) - 1;
    return data.factor === 1 ? labels[place] : labels[place * data.factor] + " \u2026 " + labels[last];
  };

  function fitting() {
    const room = Math.min(scroll.clientWidth - queries.offsetWidth - 24, scroll.clientHeight - keys.offsetHeight - 24);
    return Math.min(Math.max(room / Math.max(current.width, current.height), 1), 44);
  }

  function zoom(cell) {
    current.cell = Math.min(Math.max(cell, 0.5), 48);
    label();
    select(current.row, current.column, true);
  }

  // Labels that would overlap are left out, evenly.
  function label() {
    const { width, height, cell } = current;
    canvas.style.width = width * cell + "px";
    canvas.style.height = height * cell + "px";
    const step = Math.max(1, Math.ceil(12 / cell));
    for (const [box, labels, count, side] of [[keys, current.keys, width, "left"], [queries, current.queries, height, "top"]]) {
      const shown = [];
      for (let i = 0; i < count; i += step) {
        const span = document.createElement("span");
        span.append(element("bdi", labels[i * data.factor]));
        span.title = named(labels, i);
        span.dataset.at = i;
        span.style[side] = Math.max((i + 0.5) * cell, 6) + "px";
        shown.push(span);
      }
      box.replaceChildren(...shown);
    }
  }

  function rowText() {
    const spans = current.keys.map((text, i) => {
      const span = document.createElement("span");
      span.append(element("bdi", text));
      span.dataset.at = Math.floor(i / data.factor);
      return span;
    });
    find("map-row").replaceChildren(...spans.flatMap((span) => [span, " "]));
  }

  function point(row, column) {
    const { cell, width, height } = current;
    const reading = find("map-reading");
    const value = weight(row, column);
    reading.replaceChildren(element("bdi", named(current.queries, row)), " \u2192 ", element("bdi", named(current.keys, column)), element("b", figure(value)));
    Object.assign(across.style, { left: "0", top: row * cell - 1 + "px", width: width * cell + "px", height: cell + 2 + "px" });
    Object.assign(down.style, { top: "0", left: column * cell - 1 + "px", height: height * cell + "px", width: cell + 2 + "px" });
    for (const [box, place] of [[keys, column], [queries, row]]) {
      for (const span of box.children) span.classList.toggle("on", +span.dataset.at === place);
    }
  }

  function select(row, column, keepView) {
    current.row = Math.min(Math.max(row, 0), current.height - 1);
    current.column = Math.min(Math.max(column, 0), current.width - 1);
    point(current.row, current.column);
    let top = 0;
    for (let i = 0; i < current.width; i++) top = Math.max(top, Math.abs(weight(current.row, i)));
    find("map-from").replaceChildren("From ", element("bdi", named(current.queries, current.row)), " to each token, shaded by weight");
    for (const span of find("map-row").children) {
      const value = weight(current.row, +span.dataset.at);
      span.style.setProperty("--w", top ? Math.sqrt(Math.abs(value) / top).toFixed(3) : 0);
      span.classList.toggle("minus", value < 0);
      span.classList.toggle("on", +span.dataset.at === current.column);
      span.title = figure(value);
    }
    find("map-row").querySelector(".on").scrollIntoView({ block: "nearest" });
    if (keepView) return;
    const x = current.column * current.cell, y = current.row * current.cell;
    const seenX = scroll.clientWidth - queries.offsetWidth, seenY = scroll.clientHeight - keys.offsetHeight;
    if (x < scroll.scrollLeft || x + current.cell > scroll.scrollLeft + seenX) scroll.scrollLeft = x - seenX / 2;
    if (y < scroll.scrollTop || y + current.cell > scroll.scrollTop + seenY) scroll.scrollTop = y - seenY / 2;
  }

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = (value, size) => Math.min(Math.max(Math.floor(value / current.cell), 0), size - 1);
    return [place(event.clientY - box.top, current.height), place(event.clientX - box.left, current.width)];
  };
  plane.addEventListener("pointermove", (event) => point(...under(event)));
  plane.addEventListener("pointerleave", () => point(current.row, current.column));
  plane.addEventListener("click", (event) => select(...under(event), true));
  plane.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6], PageUp: [-10, 0], PageDown: [10, 0] };
    const step = steps[event.key];
    if (!step || event.altKey || event.metaKey || event.ctrlKey) return;
    event.preventDefault();
    select(current.row + step[0], current.column + step[1]);
  });
  find("map-row").addEventListener("click", (event) => {
    const span = event.target.closest("[data-at]");
    if (span) select(current.row, +span.dataset.at);
  });
  const turn = (by) => open(heads[(heads.indexOf(wanted) + by + heads.length) % heads.length]);
  const keysOf = { p: () => turn(-1), n: () => turn(1), "+": () => zoom(current.cell * 1.4), "-": () => zoom(current.cell / 1.4) };
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !keysOf[event.key]) return;
    event.preventDefault();
    keysOf[event.key]();
  });
  const buttons = { previous: keysOf.p, next: keysOf.n, out: keysOf["-"], in: keysOf["+"], fit: () => zoom(fitting()), close: () => dialog.close() };
  for (const [name, act] of Object.entries(buttons)) find("map-" + name).addEventListener("click", () => act());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    const back = current.from.isConnected && current.from.matches("a") ? current.from : current.head.tile;
    back.focus();
  });
  addEventListener("resize", () => dialog.open && zoom(fitting()));
})();
