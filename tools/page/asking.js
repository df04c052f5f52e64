// The one dialog: what is to be done is said, and done only after a yes. Must not know what it asks about.

const box = document.querySelector("#ask");
const problem = document.querySelector("#ask-problem");
const yes = document.querySelector("#ask-yes");
const fields = document.querySelector("#ask-fields");
let work = null;

document.querySelector("#ask-no").addEventListener("click", () => box.close());
box.addEventListener("close", () => { work = null; });
box.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!work) return;
  yes.disabled = true;
  problem.textContent = "";
  try {
    const given = Object.fromEntries(new FormData(event.target));
    const told = await work(given);
    box.close();
    if (told) say(told);
  } catch (error) {
    problem.textContent = [error.message, error.remedy].filter(Boolean).join("\n");
  } finally {
    yes.disabled = false;
  }
});

// inputs: [{name, label, kind, value, options}]. run: called with what was filled in; its text is said afterwards.
export function askFor({ title, text, button, danger = false, inputs = [], run }) {
  document.querySelector("#ask-h").textContent = title;
  document.querySelector("#ask-text").textContent = text;
  problem.textContent = "";
  yes.textContent = button;
  yes.className = danger ? "danger" : "";
  fields.replaceChildren(...inputs.map(field));
  work = run;
  box.showModal();
  (fields.querySelector("input, select") ?? document.querySelector("#ask-no")).focus();
}

function field({ name, label, kind = "text", value = "", options }) {
  const made = document.createElement("label");
  const input = document.createElement(options ? "select" : "input");
  input.name = name;
  if (options) {
    input.append(...options.map(([of, text]) => Object.assign(document.createElement("option"), { value: of, textContent: text })));
  } else {
    Object.assign(input, { type: kind, value, required: true, maxLength: 200, autocomplete: "off" });
  }
  made.append(label, input);
  return made;
}

let silence;
export function say(text) {
  const said = document.querySelector("#said");
  said.textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => { said.textContent = ""; }, 6000);
}
