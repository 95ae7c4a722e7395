// Puts a field above each table of class "filtered" that hides rows without the words typed there.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.filtered")) {
    const input = document.createElement("input");
    input.className = "table-filter";
    input.type = "search";
    input.placeholder = "Filter by words, such as: partition seed";
    input.setAttribute("aria-label", "Filter the rows of the table");
    const wrapper = table.closest(".table-wrapper") || table;
    wrapper.before(input);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
});
