"use strict";
// Shows the OpenAPI document of this server. Nothing is loaded from elsewhere, and text from the
// document is only ever inserted as text.

const REFERENCE = "#/components/schemas/";

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function linkSchema(name) {
  return make("a", { href: `#schema-${name}` }, name);
}

// Returns the nodes that describe a type in a few words.
function describeType(schema) {
  if (schema.$ref) return [linkSchema(schema.$ref.slice(REFERENCE.length))];
  const members = schema.anyOf || schema.oneOf;
  if (members) return members.flatMap((entry, i) => [...(i ? [" or "] : []), ...describeType(entry)]);
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["list of ", ...describeType(schema.items || {})];
  const bounds = [
    ["at least", schema.minimum ?? schema.minLength],
    ["at most", schema.maximum ?? schema.maxLength],
  ].filter(([, value]) => value !== undefined);
  const limits = bounds.map(([words, value]) => `${words} ${value}`).join(", ");
  return [(schema.type || "any") + (limits ? ` (${limits})` : "")];
}

function showProperties(schema) {
  const required = new Set(schema.required || []);
  const rows = Object.entries(schema.properties || {}).map(([name, property]) =>
    make(
      "tr",
      {},
      make("td", {}, make("code", {}, name), required.has(name) ? " (required)" : ""),
      make("td", {}, ...describeType(property)),
      make("td", { class: "note" }, property.description || ""),
    ),
  );
  const head = make("tr", {}, ...["Field", "Type", ""].map((text) => make("th", {}, text)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

function showSchema([name, schema]) {
  const body = schema.properties ? showProperties(schema) : make("p", {}, ...describeType(schema));
  const note = make("p", { class: "note" }, schema.description || "");
  return make("div", { class: "schema", id: `schema-${name}` }, make("h3", {}, name), note, body);
}

function showContent(title, content) {
  const entries = Object.entries(content || {}).map(([type, { schema, itemSchema }]) =>
    make("li", {}, make("code", {}, type), ": ", ...describeType(schema || itemSchema || {})),
  );
  return entries.length ? make("div", {}, make("strong", {}, title), make("ul", {}, ...entries)) : "";
}

function showResponse([status, response]) {
  const title = `${status}: ${response.description}`;
  return status === "200" ? showContent(title, response.content) : make("p", { class: "note" }, title);
}

function showRoute({ path, method, operation }) {
  const parameters = (operation.parameters || []).map((entry) =>
    make("li", {}, make("code", {}, entry.name), ` in the ${entry.in}: `, ...describeType(entry.schema)),
  );
  return make(
    "article",
    { id: operation.operationId },
    make("h3", {}, make("span", { class: "method" }, method.toUpperCase()), make("code", {}, path)),
    make("p", {}, operation.summary || ""),
    parameters.length ? make("ul", {}, ...parameters) : "",
    showContent("Body", operation.requestBody && operation.requestBody.content),
    make(
      "details",
      {},
      make("summary", {}, "Answers"),
      ...Object.entries(operation.responses).map(showResponse),
    ),
  );
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`openapi.json: ${response.status}`);
  const { paths, components } = await response.json();
  const routes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  );
  const links = routes.map(({ path, method, operation }) =>
    make("li", {}, make("a", { href: `#${operation.operationId}` }, `${method.toUpperCase()} ${path}`)),
  );
  document.getElementById("index").replaceChildren(make("ul", {}, ...links));
  const tags = [...new Set(routes.map(({ operation }) => operation.tags[0]))];
  const groups = tags.flatMap((tag) => [
    make("h2", {}, tag),
    ...routes.filter(({ operation }) => operation.tags[0] === tag).map(showRoute),
  ]);
  document.getElementById("routes").replaceChildren(...groups);
  const schemas = Object.entries(components.schemas).sort(([a], [b]) => a.localeCompare(b));
  document.getElementById("schemas").replaceChildren(...schemas.map(showSchema));
  if (location.hash) document.querySelector(`[id="${CSS.escape(location.hash.slice(1))}"]`)?.scrollIntoView();
}

show().catch((error) => {
  document.getElementById("routes").textContent = `The document can't be shown: ${error.message}`;
});
