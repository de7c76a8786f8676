/**
 * Colours for values.
 *
 * Both ramps rise evenly in lightness (stops chosen in OKLCH), so that they keep their order in greyscale and for
 * every kind of colour vision: higher is darker on a light background, and brighter on a dark one.
 */

const RAMPS = {
  heat: {
    light: ["#f6efcd", "#f1dba1", "#f0c374", "#ed9d49", "#e7732b", "#cf5031", "#b32d37", "#871f3e", "#5d1438"],
    dark: ["#411f3e", "#64244c", "#8b264f", "#b3384a", "#d85039", "#ec7b37", "#faa549", "#fccd71", "#fef1a1"],
  },
  cool: {
    light: ["#d9f5f3", "#aee1df", "#82cdcd", "#5bb3ba", "#3099a9", "#1a7d99", "#0e6288", "#184876", "#1c3060"],
    dark: ["#1f2f54", "#21446a", "#205b7f", "#217693", "#2992a4", "#4cb0b7", "#6fcdc9", "#a1e4d7", "#cefae9"],
  },
};

const darkness = window.matchMedia("(prefers-color-scheme: dark)");

export const isDark = () => darkness.matches;

/** Call back when the theme changes between light and dark. */
export const onThemeChange = (listener) => darkness.addEventListener("change", listener);

/** A colour of the style sheet, by its variable. */
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A function from values to colours; `low` to `high` span the ramp, and values outside take its end colours. */
export function ramp(name, low, high) {
  const stops = RAMPS[name][isDark() ? "dark" : "light"].map(rgb);
  const width = high - low;
  return (value) => {
    const share = width > 0 ? Math.min(1, Math.max(0, (value - low) / width)) : 0.5;
    const at = share * (stops.length - 1);
    const first = Math.min(Math.floor(at), stops.length - 2);
    const part = at - first;
    const mixed = stops[first].map((channel, index) => Math.round(channel + (stops[first + 1][index] - channel) * part));
    return `rgb(${mixed.join(" ")})`;
  };
}

/** Black or white, whichever is more legible on a colour. */
export function inkOn(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? "#14181c" : "#ffffff";
}

function rgb(hex) {
  return [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16));
}
