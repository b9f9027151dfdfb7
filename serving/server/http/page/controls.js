// The form: what the server offers becomes fields, and fields become a request.

const $ = (id) => document.getElementById(id);

export class Controls {
  constructor() {
    this.offer = null;
    $("key").value = sessionStorage.getItem("draftwell-key") ?? "";
    $("key").addEventListener("input", () => sessionStorage.setItem("draftwell-key", this.key));
    $("strategy").addEventListener("change", () => this.showParameters());
  }

  get key() { return $("key").value.trim(); }
  get ready() { return this.offer !== null; }
  get greedy() { return Number($("temperature").value) === 0; }
  get strategy() { return this.offer.strategies.find((s) => s.name === $("strategy").value); }

  askForKey() {
    $("key-box").open = true;
    $("key").focus();
  }

  // `offer`: {model, default, max_context, exact, allow_parameters, strategies: [{name, lossless, parameters: {name: description}}]}
  show(offer) {
    this.offer = offer;
    $("strategy").replaceChildren(...offer.strategies.map(({ name }) => {
      const tuned = name === offer.default ? " (served)" : "";
      return new Option(name + tuned, name, false, name === offer.default);
    }));
    $("strategy").disabled = false;
    $("max-tokens").max = offer.max_context;
    this.showParameters();
  }

  showParameters() {
    const { lossless, parameters } = this.strategy;
    $("strategy-note").textContent = lossless ? "Lossless: it answers as the target alone would." : "Lossy: answers may differ from the target's own.";
    $("parameters").hidden = !Object.keys(parameters).length;
    $("parameters-note").textContent = this.offer.allow_parameters ? "" : "Shown only: this server runs without --allow-parameters.";
    $("fields").replaceChildren(...Object.entries(parameters).map(([name, spec]) => this.field(name, spec)));
  }

  field(name, spec) {
    const input = this.input(spec);
    input.id = `parameter-${name}`;
    input.name = name;
    input.disabled = !this.offer.allow_parameters;
    const label = document.createElement("label");
    label.htmlFor = input.id;
    label.textContent = name;
    const note = document.createElement("p");
    note.className = "note";
    note.id = `${input.id}-note`;
    note.textContent = spec.description;
    input.setAttribute("aria-describedby", note.id);
    const row = document.createElement("div");
    if (spec.type === "boolean") {
      label.className = "check";
      label.prepend(input);
      row.append(label, note);
    } else {
      row.append(label, input, note);
    }
    return row;
  }

  input(spec) {
    if (spec.choices) {
      const select = document.createElement("select");
      select.append(...spec.choices.map((choice) => new Option(choice, choice, false, choice === spec.value)));
      return select;
    }
    const input = document.createElement("input");
    if (spec.type === "boolean") {
      input.type = "checkbox";
      input.checked = spec.value === true;
      return input;
    }
    input.type = "number";
    input.step = spec.type === "integer" ? "1" : "any";
    if (spec.minimum !== null) input.min = spec.minimum;
    if (spec.maximum !== null) input.max = spec.maximum;
    input.value = spec.value ?? "";
    return input;
  }

  // Only what was changed is sent: the rest stays as it was tuned.
  parameters() {
    const changed = {};
    for (const [name, spec] of Object.entries(this.strategy.parameters)) {
      const input = $(`parameter-${name}`);
      const value = spec.type === "boolean" ? input.checked : spec.choices ? input.value : input.value === "" ? null : Number(input.value);
      if (value !== null && value !== spec.value) changed[name] = value;
    }
    return changed;
  }

  speculation() {
    const changed = this.offer.allow_parameters ? this.parameters() : {};
    const chosen = $("strategy").value;
    return { ...(chosen === this.offer.default ? {} : { strategy: chosen }), ...(Object.keys(changed).length ? { parameters: changed } : {}) };
  }

  request() {
    const prompt = $("prompt").value;
    const chat = document.querySelector('[name="endpoint"]:checked').value === "chat";
    const body = { model: this.offer.model, max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value), stream: true };
    return chat
      ? { path: "/v1/chat/completions", body: { ...body, messages: [{ role: "user", content: prompt }] } }
      : { path: "/v1/completions", body: { ...body, prompt } };
  }
}
