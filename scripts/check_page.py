"""Uses the server's page in a headless browser and checks what it shows.

usage: check_page.py BROWSER ADDRESS [PICTURE.png]

In wide and narrow windows, light and dark: a message that is typed and sent with Enter gets the answer that the API gives,
the map of active neurons is drawn, mostly at its hot end, nothing overflows the window, and the console stays empty. Then
line breaks, Esc, errors, Clear and the marks of hot neurons. PICTURE.png is written as a screenshot with an answer.
"""

import base64
import json
import pathlib
import sys
import tempfile
import time
import urllib.request

from browser import Browser

WINDOWS = [("wide", 1400, 900), ("phone", 390, 844)]
PROMPT = 'def answer(values):\n    """Combining all pairs of different positions in values, return the total of the pair products."""'
MAX_TOKENS = 100
ENTER, ESCAPE = ("Enter", 13, "\r"), ("Escape", 27, "")
SHIFT = 8

# Contents of the page; the map's pixels in the colour of active neurons, with their alpha, in its left and its right half.
LOOK = """(() => {
  const canvas = document.getElementById('map'), {width, height} = canvas;
  // A copy, since the browser warns of canvases that are read.
  const copy = Object.assign(document.createElement('canvas'), {width, height}).getContext('2d', {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 0, width, height).data;
  const colours = new Set(), halves = [0, 0];
  for (let i = 0; i < data.length; i += 4) {
    const [red, green, blue, alpha] = data.subarray(i, i + 4);
    if (alpha < 40 || red < blue + 60) continue;
    colours.add([red, green, blue, alpha].map(part => part >> 4).join());
    halves[i / 4 % width < width / 2 ? 0 : 1]++;
  }
  const out = [...document.querySelectorAll('body *')].filter(node => node.getClientRects().length && node.getBoundingClientRect().right > innerWidth + .5);
  const cut = [...document.querySelectorAll('body *')].filter(node => node.clientWidth && node.scrollWidth > node.clientWidth + 1);
  const text = id => document.getElementById(id).textContent;
  return {inner: innerWidth, width: document.documentElement.scrollWidth, out: [...out, ...cut].map(node => node.outerHTML.slice(0, 80)),
    paper: getComputedStyle(document.body).backgroundColor, colours: colours.size, halves, map: canvas.getAttribute('aria-label'),
    answers: [...document.querySelectorAll('.answer')].map(node => node.textContent), errors: [...document.querySelectorAll('.error')].map(node => node.textContent),
    notes: [...document.querySelectorAll('.note')].map(node => node.textContent), message: document.getElementById('message').value,
    articles: document.querySelectorAll('article').length, isBusy: !document.getElementById('stop').disabled, isReady: model !== null,
    numbers: ['speed', 'computed', 'bytes', 'batch', 'prompt-tokens', 'answer-tokens'].map(text)};
})()"""


def press(browser, key, modifiers=0):
    name, code, text = key
    for kind in ["keyDown", "keyUp"]:
        typed = {"text": text} if text and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, modifiers=modifiers, **typed)


def type_message(browser, text):
    """Types a message where the page has put the cursor."""
    assert browser.evaluate("document.activeElement.id") == "message", "the cursor is not in the message"
    browser.call("Input.insertText", text=text)


def fill(browser, field, value):
    browser.evaluate(f"document.getElementById('{field}').value = {json.dumps(str(value))}")


def wait_for(browser, condition, what):
    for _ in range(600):
        found = browser.evaluate(LOOK)
        if condition(found):
            return found
        time.sleep(0.05)
    raise SystemExit(f"waited 30 s for {what}: {found}")


def completion(address):
    """The answer of the API to the request that the page sends, without streaming."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def check_console(browser, where):
    browser.evaluate("0")
    for event in browser.events:
        quiet = event["method"] not in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        assert quiet, f"{where}: {event['params']}"


def check_fit(found, where):
    assert found["width"] <= found["inner"], f"{where}: {found['width']} pixels in a window of {found['inner']}"
    assert not found["out"], f"{where}: these are cut off: {found['out']}"


def open_page(browser, address, width, height, theme, is_phone=False):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.events.clear()
    browser.call("Page.navigate", url=f"{address}/")
    browser.wait_for("Page.loadEventFired")
    return wait_for(browser, lambda found: found["isReady"], "the model's description")


def ask(browser):
    """Sends the prompt; returns the page with the answer."""
    fill(browser, "temperature", 0)
    fill(browser, "limit", MAX_TOKENS)
    type_message(browser, PROMPT)
    press(browser, ENTER)
    return wait_for(browser, lambda found: found["answers"] and not found["isBusy"], "an answer")


def check_answers(browser, address, expected):
    text = expected["choices"][0]["text"]
    assert text.strip(), "the API's answer is empty"
    papers = set()
    for name, width, height in WINDOWS:
        for theme in ["light", "dark"]:
            where = f"{name}, {theme}"
            found = open_page(browser, address, width, height, theme, name == "phone")
            papers.add(found["paper"])
            assert found["inner"] == width, f"{where}: a window of {found['inner']}"
            assert found["colours"] == 0, f"{where}: neurons are active before a token"
            check_fit(found, where)
            found = ask(browser)
            assert not found["errors"], f"{where}: {found['errors']}"
            assert found["answers"] == [text], f"{where}: {found['answers']}, not {text!r}"
            assert found["colours"] > 1, f"{where}: the map has {found['colours']} colours of active neurons"
            assert found["halves"][0] > found["halves"][1], f"{where}: more cold than hot neurons are active: {found['halves']}"
            assert "layer 0: " in found["map"], f"{where}: {found['map']}"
            assert "tokens/s" in found["numbers"][0] and all(number not in ("", "–") for number in found["numbers"]), f"{where}: {found['numbers']}"
            tokens = f"{expected['usage']['completion_tokens']}\u00a0tokens"
            assert found["numbers"][5] == tokens, f"{where}: {found['numbers'][5]}, not {tokens}"
            check_fit(found, where)
            check_console(browser, where)
    assert len(papers) == 2, f"light and dark look the same: {papers}"


def check_keys(browser, address):
    """Checks line breaks, Esc, errors of the server, texts with markup, and Clear."""
    open_page(browser, address, 1400, 900, "light")
    type_message(browser, "first")
    press(browser, ENTER, SHIFT)
    type_message(browser, "second")
    found = browser.evaluate(LOOK)
    assert found["message"] == "first\nsecond" and found["articles"] == 0, f"Shift+Enter: {found['message']!r}"
    # The reply is held back until Esc is pressed.
    browser.evaluate("""window.sendNow = window.fetch, window.fetch = (path, options) => new Promise((_, reject) =>
      options.signal.addEventListener('abort', () => reject(options.signal.reason))), null""")
    press(browser, ENTER)
    wait_for(browser, lambda found: found["isBusy"], "a request")
    press(browser, ESCAPE)
    found = wait_for(browser, lambda found: not found["isBusy"], "Esc")
    assert found["notes"] == ["Stopped."] and not found["errors"], f"Esc: {found['notes']}, {found['errors']}"
    browser.evaluate("window.fetch = window.sendNow, null")
    check_console(browser, "keys")
    # Longer than the context: refused with a message, and not lost.
    long = "<img src=x onerror=alert(1)> " * 4000
    type_message(browser, long)
    press(browser, ENTER)
    found = wait_for(browser, lambda found: found["errors"], "an error")
    assert "context holds" in found["errors"][0] and found["message"] == long, f"error: {found['errors']}"
    check_fit(found, "an error")
    assert browser.evaluate("document.querySelectorAll('main img').length") == 0, "markup of a message is in the page"
    browser.evaluate("document.getElementById('message').value = ''; document.getElementById('clear').click()")
    assert browser.evaluate(LOOK)["articles"] == 0, "Clear has left messages"


def check_marks(browser, address):
    """Checks where the map marks the end of the hot neurons; a machine without a GPU has none, so they are made up."""
    open_page(browser, address, 1400, 900, "light")
    found = browser.evaluate(
        """(() => {
        const layers = model.powerinfer.layers, neurons = model.powerinfer.neurons_per_layer;
        layers[0] = {...layers[0], hot_neurons: neurons / 4, hot_on_gpu: true};
        layers[1] = {...layers[1], hot_neurons: neurons / 2, hot_on_gpu: false};
        draw();
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
        copy.drawImage(canvas, 0, 0);
        const room = canvas.clientWidth - LEFT - RIGHT;
        return [0, 1].map(layer => [...copy.getImageData(LEFT + room / (layer ? 2 : 4), rowHeight() * (layer + .5), 1, 1).data.slice(0, 3)]); })()"""
    )
    (red, _, blue), cpu = found
    assert blue > red + 100 and max(cpu) < 60, f"the marks of hot neurons are drawn as {found}"


def take_picture(browser, address, path):
    open_page(browser, address, 1200, 700, "light")
    ask(browser)
    shot = browser.call("Page.captureScreenshot", format="png")
    path.write_bytes(base64.b64decode(shot["data"]))


def main():
    program, address = sys.argv[1], sys.argv[2]
    expected = completion(address)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            check_answers(browser, address, expected)
            check_keys(browser, address)
            check_marks(browser, address)
            for picture in sys.argv[3:]:
                take_picture(browser, address, pathlib.Path(picture))
        finally:
            browser.close()
    tokens = expected["usage"]["completion_tokens"]
    print(f"{address}: an answer of {tokens} tokens and its neurons checked, wide and narrow, light and dark; keys, errors and Clear")


main()
