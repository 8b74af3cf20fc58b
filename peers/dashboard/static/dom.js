// Elements, made and kept up to date. What comes from the swarm becomes text and attributes' values, never markup.

/** An element with attributes; children are elements or text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Set attributes that differ; one that is null or undefined is removed. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value === null || value === undefined || value === false) {
      element.removeAttribute(name);
    } else if (element.getAttribute(name) !== String(value)) {
      element.setAttribute(name, String(value));
    }
  }
}

/** Have an element show a text. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Have a parent's children be one element for each item, in their order. Elements stay those that they were, so that
 * focus and selection do.
 */
export function each(parent, items, keyOf, make, update) {
  const before = parent.keyed ?? new Map();
  const now = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const element = before.get(key) ?? make(item);
    update(element, item);
    now.set(key, element);
  }
  for (const [key, element] of before) if (!now.has(key)) element.remove();
  let place = parent.firstChild;
  for (const element of now.values()) {
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
  parent.keyed = now;
}
