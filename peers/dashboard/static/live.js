// The connection to the dashboard, and the state that it tells: whole at first, then what changes (RFC 7386).

const LONGEST_WAIT_SECONDS = 15;
const REFUSED = 4401;
const FULL = 1013;

/** Apply a JSON Merge Patch. */
function merge(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete target[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const inner = target[name];
      target[name] = merge(typeof inner === "object" && inner !== null && !Array.isArray(inner) ? inner : {}, value);
    } else target[name] = value;
  }
  return target;
}

/**
 * Follow the dashboard for as long as the page is open.
 * `heard(state, history)` has the history where the state is whole. `lost(why)` says that there is no connection.
 * `refused()` gives a promise of a token.
 */
export async function follow({ heard, lost, refused }) {
  let token = remembered();
  let wait = 1;
  for (;;) {
    const code = await converse(token, (state, history) => {
      wait = 1;
      heard(state, history);
    });
    if (code === REFUSED) {
      token = await refused(token !== "");
      remember(token);
      continue;
    }
    lost(code === FULL ? "Too many people look at this page now" : "Not connected");
    await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    wait = Math.min(LONGEST_WAIT_SECONDS, wait * 2);
  }
}

/** One connection, from its beginning to its end; gives the code with which it was closed. */
function converse(token, heard) {
  return new Promise((resolve) => {
    const address = new URL("live", location.href);
    address.protocol = address.protocol.replace("http", "ws");
    address.hash = "";
    const socket = new WebSocket(address);
    let state = {};
    socket.addEventListener("open", () => socket.send(token));
    socket.addEventListener("message", ({ data }) => {
      const message = JSON.parse(data);
      if (message.whole) state = message.whole;
      else merge(state, message.patch);
      heard(state, message.history);
    });
    socket.addEventListener("close", ({ code }) => resolve(code));
  });
}

/** The token behind the address's #, which is then hidden, or the one that was entered before. */
function remembered() {
  const given = location.hash.slice(1);
  if (given && !document.getElementById(given)) {
    history.replaceState(null, "", location.pathname);
    remember(given);
    return given;
  }
  try {
    return sessionStorage.getItem("token") ?? "";
  } catch {
    return "";
  }
}

function remember(token) {
  try {
    sessionStorage.setItem("token", token);
  } catch {
    // The browser keeps nothing for this page.
  }
}
