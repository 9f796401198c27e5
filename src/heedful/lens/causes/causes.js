(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const LEFT = { 1: "o", 2: "<", 3: "-" }, RIGHT = { 1: "o", 2: ">", 3: "-" };
  for (const graph of document.querySelectorAll("svg.causes-graph[data-column]")) {
    const tokens = [...graph.querySelectorAll(".token")];
    if (!tokens.length) continue;
    const told = graph.closest("figure").querySelector(".causes-picked");
    const drawn = graph.querySelector(".picked-marks");
    const x = +graph.dataset.column;
    const arcs = [...graph.querySelectorAll(".arc")].map((line) => ({ line, ends: line.dataset.ends.split(" ").map(Number) }));
    arcs.sort((one, other) => one.ends[0] - other.ends[0] || one.ends[1] - other.ends[1]);
    const name = (node) => tokens[node].querySelector("title")?.textContent ?? tokens[node].querySelector("text").textContent;
    const first = told.textContent;

    const shape = (mark, y, kind) => {
      const part = document.createElementNS(SVG, mark === 2 ? "path" : "circle");
      const values = mark === 2 ? { class: "arrow", d: `M${x + 0.5} ${y}l7.5 -3.4v6.8z` } : { cx: x + 4, cy: y, r: 2.9 };
      for (const [key, value] of Object.entries(values)) part.setAttribute(key, value);
      const group = document.createElementNS(SVG, "g");
      group.setAttribute("class", kind);
      group.append(part);
      return group;
    };

    function pick(node) {
      const on = tokens[node].getAttribute("aria-pressed") !== "true";
      for (const token of tokens) token.setAttribute("aria-pressed", String(on && +token.dataset.node === node));
      graph.classList.toggle("picked", on);
      drawn.replaceChildren();
      const edges = [];
      for (const { line, ends: [a, b, atA, atB] } of arcs) {
        const mine = on && (a === node || b === node);
        line.classList.toggle("on", mine);
        if (!mine) continue;
        const path = line.getAttribute("d").match(/[\d.]+/g).map(Number);
        const kind = line.classList[1];
        for (const [mark, y] of [[atA, path[1]], [atB, path[path.length - 2]]]) if (mark !== 3) drawn.append(shape(mark, y, kind));
        edges.push(`${name(a)} ${LEFT[atA]}-${RIGHT[atB]} ${name(b)}`);
      }
      const of = edges.length === 1 ? "1 edge" : `${edges.length} edges`;
      // An edge in letters is not broken across lines.
      const spans = edges.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
      told.replaceChildren(...(on ? [`${name(node)}: ${of}. `, ...spans.flatMap((span, at) => (at ? [", ", span] : [span]))] : [first]));
    }

    const reach = (node, focus) => {
      tokens.forEach((token, at) => token.setAttribute("tabindex", at === node ? "0" : "-1"));
      if (focus) tokens[node].focus();
    };
    graph.setAttribute("role", "group");
    tokens.forEach((token, node) => {
      token.setAttribute("role", "button");
      token.setAttribute("aria-pressed", "false");
      token.setAttribute("aria-label", `${name(node)}, show its edges alone`);
      token.addEventListener("click", () => { reach(node, false); pick(node); });
      token.addEventListener("keydown", (event) => {
        const to = { ArrowDown: node + 1, ArrowUp: node - 1, Home: 0, End: tokens.length - 1 }[event.key];
        if (event.altKey || event.ctrlKey || event.metaKey) return;
        if (to !== undefined) reach(Math.min(Math.max(to, 0), tokens.length - 1), true);
        else if (event.key === "Enter" || event.key === " ") pick(node);
        else if (event.key === "Escape" && token.getAttribute("aria-pressed") === "true") pick(node);
        else return;
        event.preventDefault();
      });
    });
    reach(0, false);
  }
})();
