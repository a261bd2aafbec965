# Sourced by the checks of pages: finds Chromium, installing it with apt if possible, and the program. Exits with 75 without a
# browser or Python; `checked` names what is not checked then. Sets `browser` and POWERINFER.

skip() {
  echo "skipped the check of $checked: $1" >&2
  exit 75
}

find_browser() {
  for name in chromium chromium-browser google-chrome; do
    command -v "$name" && return
  done
  return 1
}

command -v python3 > /dev/null || skip "python3 not found"
if ! browser=$(find_browser); then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    (apt-get update -q && apt-get install -y -q --no-install-recommends chromium) > /dev/null 2>&1 || true
  fi
  browser=$(find_browser) || skip "Chromium not found, and it cannot be installed"
fi
if [ -z "${POWERINFER:-}" ]; then
  cargo build --locked -p powerinfer-cli
  POWERINFER=$(realpath "${CARGO_TARGET_DIR:-target}")/debug/powerinfer
fi
