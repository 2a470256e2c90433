// Choices that the browser keeps. This script runs before the page is painted, so that the page has
// the chosen theme from the beginning.
"use strict";

const choices = {
  read() {
    try {
      return JSON.parse(localStorage.getItem("aligner-view")) || {};
    } catch { // a browser may forbid storage, as for a saved report
      return {};
    }
  },
  write(values) {
    try {
      localStorage.setItem("aligner-view", JSON.stringify({ ...choices.read(), ...values }));
    } catch { /* the choice lasts until the page is closed */ }
  },
};

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

setTheme(choices.read().theme);
