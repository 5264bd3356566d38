// Makes the tables of a page sortable by a button in each heading; a third press restores the order of the page.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const text = (row, k) => row.cells[k].textContent.trim();
  const missing = (cell) => cell === "" || cell === "-";
  const number = (cell) => parseFloat(cell.replaceAll(",", ""));  // of an interval its first number
  const grouped = rows.some((row) => row.classList.contains("first"));

  function sort(k, order) {
    const numeric = rows.every((row) => missing(text(row, k)) || !Number.isNaN(number(text(row, k))));
    const compare = (a, b) => numeric ? number(a) - number(b) : a.localeCompare(b, undefined, { numeric: true });
    const known = rows.filter((row) => !missing(text(row, k))), unknown = rows.filter((row) => missing(text(row, k)));
    if (order) known.sort((a, b) => (order === "ascending" ? 1 : -1) * compare(text(a, k), text(b, k)));
    const shown = order ? [...known, ...unknown] : rows;
    shown.forEach((row, i) => row.classList.toggle(  // rules between groups, only where groups are together
      "first", grouped && (!order || k === 0) && i > 0 && text(row, 0) !== text(shown[i - 1], 0)));
    body.append(...shown);
    heads.forEach((head, i) => i === k && order ? head.setAttribute("aria-sort", order) : head.removeAttribute("aria-sort"));
    return numeric;
  }

  if (rows.length > 1) heads.forEach((head, k) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const numeric = rows.some((row) => !Number.isNaN(number(text(row, k))));
    const orders = numeric ? ["descending", "ascending", null] : ["ascending", "descending", null];
    button.addEventListener("click", () => sort(k, orders[(orders.indexOf(head.getAttribute("aria-sort")) + 1) % 3]));
  });
}
