// Markdown as far as models write it. Text enters the document as text nodes alone: nothing here parses HTML.
"use strict";

/** An element with attributes and children; strings among these become text. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") element.addEventListener("click", value);
    else if (value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/, HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/, QUOTE = /^ {0,3}> ?/, INDENTED = /^(?: {2}|\t)/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+|$)/, CELLS = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?\|? *$/;
// Bounded, so that no text takes a time that grows with the square of its length.
const INLINE = new RegExp(
  ["(?<!`)(`+)(?!`)([^]{1,2000}?)(?<!`)\\1(?!`)", "\\*\\*(?=\\S)([^]{0,2000}?\\S)\\*\\*(?!\\*)",
    "(?<![*\\w])\\*(?=[^\\s*])([^*]{0,2000}?[^\\s*])\\*(?![*\\w])", "~~(?=\\S)([^]{0,2000}?\\S)~~",
    "\\\\([!-\\/:-@[-`{-~])"].join("|"), "g");
const DEEPEST = 8;

/** Blocks of a text: {kind, lines}. */
function split(text) {
  const lines = text.split("\n"), blocks = [];
  const isTable = (at) => lines[at].includes("|") && CELLS.test(lines[at + 1] ?? "");
  const begins = (at) => FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at])
    || QUOTE.test(lines[at]) || ITEM.test(lines[at]) || isTable(at);
  let at = 0;
  const take = (kind, goesOn) => {
    const from = at++;
    while (at < lines.length && goesOn(lines[at])) at++;
    blocks.push({ kind, lines: lines.slice(from, at) });
  };
  const inList = (isOrdered) => (line) => {
    if (!line.trim()) return Boolean(lines[at + 1]?.trim()) && inList(isOrdered)(lines[at + 1]);
    const item = ITEM.exec(line);
    return INDENTED.test(line) || Boolean(item && !RULE.test(line) && /\d/.test(item[2]) === isOrdered);
  };
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      const ends = (other) => other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).trim();
      take("code", (other) => !ends(other));
      at++;
    } else if (HEADING.test(line)) take("heading", () => false);
    else if (RULE.test(line)) take("rule", () => false);
    else if (isTable(at)) take("table", (other) => other.includes("|"));
    else if (QUOTE.test(line)) take("quote", (other) => QUOTE.test(other));
    else if (ITEM.test(line)) take("list", inList(/\d/.test(ITEM.exec(line)[2])));
    else take("paragraph", (other) => other.trim() && !begins(at));
  }
  return blocks;
}

function inline(parent, text, depth = 0) {
  let from = 0;
  for (const found of depth > DEEPEST ? [] : text.matchAll(INLINE)) {
    const [all, , code, strong, emphasis, struck, escaped] = found;
    parent.append(text.slice(from, found.index));
    from = found.index + all.length;
    if (code !== undefined) parent.append(make("code", {}, code.replace(/^ (.*\S.*) $/s, "$1")));
    else if (escaped !== undefined) parent.append(escaped);
    else {
      const name = strong !== undefined ? "strong" : emphasis !== undefined ? "em" : "s";
      parent.append(inline(make(name), strong ?? emphasis ?? struck, depth + 1));
    }
  }
  parent.append(text.slice(from));
  return parent;
}

const DRAW = {
  paragraph: ({ lines }) => inline(make("p"), lines.join("\n")),
  rule: () => make("hr"),
  heading({ lines }) {
    const [, marks, text] = HEADING.exec(lines[0]);
    return inline(make(`h${Math.min(marks.length + 2, 5)}`), text);
  },
  quote: ({ lines }, depth) => draw(make("blockquote"), lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth),
  code({ lines }) {
    const code = lines.slice(1).join("\n"), language = FENCE.exec(lines[0])[2].trim();
    const head = make("div", {}, make("span", {}, language), copyButton(() => code));
    return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, make("code", {}, code)));
  },
  table({ lines }) {
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
    const sides = cells(lines[1]).map((cell) => (/^:?-+:$/.test(cell) ? (cell[0] === ":" ? "center" : "right") : ""));
    const row = (name, line) => make("tr", {}, ...cells(line).map((cell, column) =>
      inline(make(name, { class: sides[column] || false }), cell.replaceAll("\\|", "|"))));
    const body = make("tbody", {}, ...lines.slice(2).map((line) => row("td", line)));
    const table = make("table", {}, make("thead", {}, row("th", lines[0])), body);
    return make("div", { class: "table", tabindex: 0 }, table);
  },
  list({ lines }, depth) {
    const [, indent, mark] = ITEM.exec(lines[0]), items = [];
    let width = 0;
    for (const line of lines) {
      const found = ITEM.exec(line);
      if (found && found[1].length <= indent.length + 1) {
        width = found[1].length + found[2].length + 1;
        items.push([line.slice(found[0].length)]);
      } else items.at(-1).push(line.replace(new RegExp(`^[ \\t]{0,${width}}`), ""));
    }
    const list = /\d/.test(mark) ? make("ol", { start: parseInt(mark, 10) }) : make("ul");
    list.append(...items.map((item) => draw(make("li"), item.join("\n"), depth)));
    return list;
  },
};

/** Draws a text into parent. Blocks that stayed as they were keep their elements, so that a stream costs its end. */
function draw(parent, text, depth = 0) {
  const blocks = depth > DEEPEST ? [{ kind: "paragraph", lines: [text] }] : split(text);
  blocks.forEach((block, place) => {
    const source = `${block.kind}\n${block.lines.join("\n")}`, old = parent.children[place];
    if (old?.source === source) return;
    const drawn = DRAW[block.kind](block, depth + 1);
    drawn.source = source;
    if (old) old.replaceWith(drawn);
    else parent.append(drawn);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
  return parent;
}

function copyButton(text) {
  if (!navigator.clipboard) return "";
  const copy = async ({ target }) => {
    await navigator.clipboard.writeText(text());
    target.textContent = "Copied";
    setTimeout(() => (target.textContent = "Copy"), 1500);
  };
  return make("button", { type: "button", onclick: copy }, "Copy");
}
