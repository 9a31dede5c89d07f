// A button copies the text that its data-copy names. A file dropped on the field for lines is put in the file field of
// its form; a small text file is shown in it.
"use strict";
for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const text = document.getElementById(button.dataset.copy);
    // navigator.clipboard is there over https and on the loopback alone
    getSelection().selectAllChildren(text);
    document.execCommand("copy");
    button.textContent = "Copied";
  });
}
(() => {
  const field = document.querySelector("[data-drop]");
  const picked = document.querySelector('input[name="file"]');
  if (!field || !picked) return;
  const SHOWN_BYTES = 200_000;
  const READABLE = /\.(jsonl?|ndjson|csv|tsv|tab|txt)$/i;
  field.addEventListener("dragover", (event) => {
    event.preventDefault();
    field.classList.add("is-over");
  });
  field.addEventListener("dragleave", () => field.classList.remove("is-over"));
  field.addEventListener("drop", async (event) => {
    field.classList.remove("is-over");
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    event.preventDefault();
    if (file.size <= SHOWN_BYTES && READABLE.test(file.name)) {
      field.value = await file.text();
      picked.value = "";
    } else {
      picked.files = event.dataTransfer.files;
    }
  });
})();
