/**
 * The form that exchanges a token for a session. The page keeps neither: the token is sent once, the cookie is
 * HttpOnly.
 */

import { CallError, session } from "./api.js";
import { el, setText } from "./dom.js";

export class LoginView {
  /** @param {(session: object) => void} onLogin */
  constructor(onLogin, why = "") {
    this.title = "Log in";
    const wrong = el("p", { class: "outcome wrong", role: "alert" });
    const field = el("input", {
      type: "password",
      id: "token",
      name: "token",
      autocomplete: "current-password",
      required: true,
      spellcheck: "false",
      "aria-describedby": "token-help",
    });
    const submit = el("button", { type: "submit", class: "primary" }, "Log in");
    const onsubmit = async (event) => {
      event.preventDefault();
      submit.disabled = true;
      setText(wrong, "");
      try {
        const found = await session.login(field.value.trim());
        field.value = "";
        onLogin(found);
      } catch (error) {
        if (!(error instanceof CallError)) throw error;
        setText(wrong, messageOf(error));
        field.select();
      } finally {
        submit.disabled = false;
      }
    };
    this.element = el(
      "section",
      { class: "login panel", "aria-labelledby": "login-title" },
      el("h1", { id: "login-title" }, "Log in"),
      why ? el("p", { class: "note" }, why) : null,
      el(
        "form",
        { onsubmit },
        // Password managers need a user name.
        el("input", { type: "text", name: "username", autocomplete: "username", value: "perseus", hidden: true }),
        el("label", { for: "token" }, "Token"),
        field,
        el("p", { class: "note", id: "token-help" }, "A reader's token shows everything; an operator's controls jobs, too. ", el("code", {}, "perseus tokens create"), " makes one."),
        wrong,
        submit,
      ),
    );
  }

  close() {}
}

function messageOf(error) {
  if (error.code === "UNAUTHENTICATED") return "This token is unknown or no longer valid.";
  return error.message.charAt(0).toUpperCase() + error.message.slice(1);
}
