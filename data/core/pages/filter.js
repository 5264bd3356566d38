// Puts a search field above each table with `data-filter`; rows without every word that is typed are hidden.
for (const table of document.querySelectorAll("table[data-filter]")) {
  const rows = [...table.tBodies[0].rows], field = document.createElement("input"), count = document.createElement("output");
  field.type = "search";
  field.placeholder = "Filter rows";
  field.setAttribute("aria-label", "Filter rows");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
  const bar = document.createElement("p");
  bar.className = "filter";
  bar.append(field, count);
  table.parentElement.before(bar);
}
