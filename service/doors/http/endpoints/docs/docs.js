// Swagger UI over this door's document: dark where the user prefers it, and examples that fit a text field.

const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", setTheme);
setTheme();

/** JSON with one field a line, and lists of numbers on one: a tensor's data has thousands. */
function textOf(example) {
  const isList = (value) => Array.isArray(value) && value.every((one) => typeof one === "number");
  const lists = [];
  const marked = (key, value) => (isList(value) ? `@${lists.push(JSON.stringify(value)) - 1}@` : value);
  return JSON.stringify(example, marked, 2).replace(/"@(\d+)@"/g, (_, at) => lists[at]);
}

const spec = await (await fetch("openapi.json")).json();
for (const path of Object.values(spec.paths)) {
  for (const operation of Object.values(path)) {
    const body = operation.requestBody?.content["application/json"];
    if (body?.example) body.example = textOf(body.example);
  }
}
/** Shows an example that is text as it is: Swagger UI would parse it, and give each number a line. */
const plainExamples = {
  afterLoad() {
    const sample = this.fn.getSampleSchema;
    this.fn.getSampleSchema = (schema, type, config, example) =>
      typeof example === "string" ? example : sample(schema, type, config, example);
  },
};

SwaggerUIBundle({
  spec,
  dom_id: "#docs",
  deepLinking: true,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  defaultModelsExpandDepth: -1,
  syntaxHighlight: false, // of tensors it takes seconds
  plugins: [plainExamples],
  presets: [SwaggerUIBundle.presets.apis],
});
