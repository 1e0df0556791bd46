// Makes a part of the page like a newer one, and touches only what differs: what somebody has opened, typed, marked or
// focused stays as it is.
"use strict";
(() => {
  const keyOf = (node) => (node.nodeType === 1 ? node.dataset?.key || node.id || "" : "");
  const isSame = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

  function attributes(from, to) {
    for (const { name, value } of [...to.attributes]) {
      if (name === "open" || (from.nodeName === "TIME" && name === "title")) continue;
      if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
    for (const { name } of [...from.attributes]) {
      if (name !== "open" && !to.hasAttribute(name)) from.removeAttribute(name);
    }
  }

  // Fills a new part, such as a table that has moved, with the rows that came without content: the page has them elsewhere.
  function filled(part) {
    for (const row of part.nodeType === 1 ? part.querySelectorAll("[data-same]") : []) {
      const known = document.querySelector(`${row.nodeName}[data-key="${CSS.escape(row.dataset.key)}"]`);
      if (known) row.replaceWith(known.cloneNode(true));
      else window.morph.isTorn = true;
    }
    return part;
  }

  function children(from, to) {
    const keyed = new Map();
    for (const child of from.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
    const kept = new Set([...to.childNodes].map(keyOf));
    for (const [key, child] of keyed) if (!kept.has(key)) child.remove(); // before its neighbours are compared, which stay where they are
    let place = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      const key = keyOf(wanted);
      while (wanted.nodeType === 1 && place?.nodeType === 3 && !place.data.trim()) { // blanks around a notice that came or went
        const next = place.nextSibling;
        place.remove();
        place = next;
      }
      let match = key ? keyed.get(key) : place && !keyOf(place) ? place : null;
      if (match && !isSame(match, wanted)) match = null;
      if (!match && wanted.dataset?.same !== undefined) { window.morph.isTorn = true; continue; } // it is not here
      if (!match) {
        from.insertBefore(filled(document.importNode(wanted, true)), place);
        continue;
      }
      if (match === place) place = place.nextSibling;
      else from.insertBefore(match, place);
      morph(match, wanted);
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  }

  function morph(from, to) {
    if (from.nodeType !== 1) {
      if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
      return;
    }
    if (from.hasAttribute("data-keep") || to.hasAttribute("data-same")) return;
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(from.nodeName)) {
      if (from.type === "hidden" || from.type === "checkbox") attributes(from, to);
      return;
    }
    if (from.nodeName === "TIME" && from.dateTime === to.dateTime) return;
    attributes(from, to);
    children(from, to);
  }

  window.morph = morph;
})();
