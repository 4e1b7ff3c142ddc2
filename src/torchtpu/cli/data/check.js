// Lets the head of a table sort it. Without it the page shows the same, in the order of cost.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const key = (row) => {
        const given = row.cells[column].dataset.value;
        return given === undefined ? row.cells[column].textContent : Number(given);
      };
      const rows = [...body.rows].sort((a, b) => {
        const x = key(a), y = key(b);
        return typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
      });
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}
