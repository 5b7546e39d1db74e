"use strict";
(() => {
  const table = document.getElementById("sites-table");
  const bodies = table ? [...table.tBodies] : [];
  const missing = (v) => v === "";

  function open(body, wanted) {
    body.rows[1].hidden = !wanted;
    body.querySelector(".toggle").setAttribute("aria-expanded", String(wanted));
  }

  function sortBy(head) {
    const at = head.cellIndex;
    const number = head.classList.contains("n");
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (body) => body.rows[0].cells[at].dataset.v;
    bodies.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      const order = number ? Number(x) - Number(y)
        : x.localeCompare(y, undefined, { numeric: true });
      return up ? order : -order;
    });
    table.append(...bodies);
  }

  function search(text) {
    const wanted = text.trim().toLowerCase();
    let shown = 0;
    for (const body of bodies) {
      body.hidden = !body.dataset.name.toLowerCase().includes(wanted);
      shown += !body.hidden;
    }
    document.getElementById("found").textContent = `${shown} of ${bodies.length} sites`;
  }

  if (table) {
    for (const head of table.tHead.rows[0].cells)
      head.firstElementChild.addEventListener("click", () => sortBy(head));
    for (const body of bodies)
      body.rows[0].addEventListener("click", () => {
        if (!String(getSelection())) open(body, body.rows[1].hidden);
      });
    document.getElementById("search").addEventListener("input", (e) => search(e.target.value));
  }

  function follow() {
    const body = location.hash && document.getElementById(location.hash.slice(1));
    if (body && body.matches("tbody.site")) {
      if (body.hidden) { document.getElementById("search").value = ""; search(""); }
      open(body, true);
      body.scrollIntoView({ block: "center" });
    }
  }
  addEventListener("hashchange", follow);
  follow();

  // Unchanged lines are stored once for all diffs; a fold says where its lines are.
  const pool = JSON.parse(document.getElementById("lines").textContent);
  function unfold(row) {
    const { left, right, lines } = row.dataset;
    const numbers = lines.split(",").flatMap((range) => {
      const [from, to = from] = range.split("-").map(Number);
      return Array.from({ length: to - from + 1 }, (_, i) => from + i);
    });
    row.replaceWith(...numbers.map((number, i) => {
      const line = document.createElement("tr");
      for (const first of [left, right]) {
        const no = line.insertCell();
        no.className = "no";
        no.textContent = Number(first) + i;
        line.insertCell().textContent = pool[number];
      }
      return line;
    }));
  }
  document.addEventListener("click", (e) => {
    const row = e.target.closest("tr.fold");
    if (row) unfold(row);
  });
})();
