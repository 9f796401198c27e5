// Looks for every word of the query in the titles and texts of INDEX; titles count most.
const field = document.getElementById("search"), list = document.getElementById("results");

function find(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const score = ({ title, text }) => {
    const name = title.toLowerCase(), body = text.toLowerCase();
    let sum = 0;
    for (const word of words) {
      const inTitle = name === word ? 20 : name.split(/[\s.]+/).some(part => part.startsWith(word)) ? 8 : name.includes(word) ? 4 : 0;
      const inText = body.includes(word) ? 1 : 0;
      if (!inTitle && !inText) return 0;
      sum += inTitle + inText;
    }
    return sum;
  };
  return INDEX.map(entry => [score(entry), entry]).filter(([sum]) => sum).sort((a, b) => b[0] - a[0]).slice(0, 25).map(pair => pair[1]);
}

function excerpt(text, query) {
  const at = Math.max(0, text.toLowerCase().indexOf(query.toLowerCase().split(/\s+/)[0]) - 50);
  return (at ? "… " : "") + text.slice(at, at + 150) + (text.length > at + 150 ? " …" : "");
}

function show() {
  const found = find(field.value);
  list.replaceChildren(...found.map(entry => {
    const item = document.createElement("li"), link = document.createElement("a");
    const title = document.createElement("b"), page = document.createElement("small"), text = document.createElement("small");
    link.href = entry.address;
    title.textContent = entry.title;
    page.textContent = entry.page;
    text.textContent = excerpt(entry.text, field.value);
    link.append(title, page, text);
    item.append(link);
    return item;
  }));
  if (field.value.trim() && !found.length) {
    const nothing = document.createElement("p");
    nothing.textContent = "Nothing found.";
    list.append(nothing);
  }
  list.hidden = !field.value.trim();
}

field.addEventListener("input", show);
field.addEventListener("keydown", event => {
  if (event.key === "Enter") list.querySelector("a")?.click();
  if (event.key === "Escape") { field.value = ""; show(); field.blur(); }
});
document.addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement !== field) { event.preventDefault(); field.focus(); }
});
list.addEventListener("click", () => { list.hidden = true; });
