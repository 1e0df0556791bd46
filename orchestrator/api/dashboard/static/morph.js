// Morphs an element into a newer version and touches only the differences, so that open details, typed text, marked rows and
// focus stay.
"use strict";
(() => {
  const keyOf = (node) => (node.nodeType === 1 ? node.dataset?.key || node.id || "" : "");
  const isSame = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

  function updateAttributes(from, to) {
    for (const { name, value } of [...to.attributes]) {
      if (name === "open" || (from.nodeName === "TIME" && name === "title")) continue;
      if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
    for (const { name } of [...from.attributes]) {
      if (name !== "open" && !to.hasAttribute(name)) from.removeAttribute(name);
    }
  }

  // Fills rows without content in a new part, such as a moved table, from the same rows elsewhere in the page. The server
  // omits the content of rows (`data-same`) that the page already has; `isTorn` tells that one of them was not found.
  function fillRows(part) {
    for (const row of part.nodeType === 1 ? part.querySelectorAll("[data-same]") : []) {
      const existing = document.querySelector(`${row.nodeName}[data-key="${CSS.escape(row.dataset.key)}"]`);
      if (existing) row.replaceWith(existing.cloneNode(true));
      else window.morph.isTorn = true;
    }
    return part;
  }

  function updateChildren(from, to) {
    const keyed = new Map();
    for (const child of from.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
    const newKeys = new Set([...to.childNodes].map(keyOf));
    for (const [key, child] of keyed) if (!newKeys.has(key)) child.remove(); // first: otherwise the siblings would be moved
    let position = from.firstChild;
    for (const target of [...to.childNodes]) {
      const key = keyOf(target);
      while (target.nodeType === 1 && position?.nodeType === 3 && !position.data.trim()) { // whitespace around a notice that was added or removed
        const next = position.nextSibling;
        position.remove();
        position = next;
      }
      let match = key ? keyed.get(key) : position && !keyOf(position) ? position : null;
      if (match && !isSame(match, target)) match = null;
      if (!match && target.dataset?.same !== undefined) { window.morph.isTorn = true; continue; } // omitted by the server, and not in this parent
      if (!match) {
        from.insertBefore(fillRows(document.importNode(target, true)), position);
        continue;
      }
      if (match === position) position = position.nextSibling;
      else from.insertBefore(match, position);
      morph(match, target);
    }
    while (position) {
      const next = position.nextSibling;
      position.remove();
      position = next;
    }
  }

  function morph(from, to) {
    if (from.nodeType !== 1) {
      if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
      return;
    }
    if (from.hasAttribute("data-keep") || to.hasAttribute("data-same")) return;
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(from.nodeName)) {
      if (from.type === "hidden" || from.type === "checkbox") updateAttributes(from, to);
      return;
    }
    if (from.nodeName === "TIME" && from.dateTime === to.dateTime) return;
    updateAttributes(from, to);
    updateChildren(from, to);
  }

  window.morph = morph;
})();
