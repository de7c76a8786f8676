/**
 * Elements made without markup.
 *
 * Every child is an element or becomes text: names, hosts and messages from others are never parsed as markup.
 */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are false, null or undefined are left out; `on…` are listeners. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An SVG element, likewise. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Replace an element's children. */
export function put(parent, ...children) {
  parent.replaceChildren(...flat(children));
}

/** Set a text; touch the document only if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}
