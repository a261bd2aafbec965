"""Opens a sweep report in a headless browser and checks how it is rendered.

usage: check_report.py BROWSER PAGE.html

In wide and narrow windows, light and dark: the page loads no external resources and does not overflow the window, marks
are at the positions of their values in the JSON file next to the page and contrast with the background, texts are legible
and do not overlap, and table headings sort. Uses the Chrome DevTools Protocol over a pipe; needs only Python.
"""

import base64
import json
import pathlib
import struct
import sys
import tempfile
import zlib

from browser import Browser

WINDOWS = [("wide", 1280, 900), ("phone", 390, 844)]


def pixels(png):
    """Rows of (red, green, blue) of a PNG of eight bits a channel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, data = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, body = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8 and colour in (2, 6), "eight bits of red, green and blue"
            channels = 3 if colour == 2 else 4
        if kind == b"IDAT":
            data += body
        place += 12 + length
    data, stride, rows = zlib.decompress(data), width * channels, []
    before = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        how, line = data[start], bytearray(data[start + 1 : start + 1 + stride])
        for i in range(stride):
            left = line[i - channels] if i >= channels else 0
            up = before[i]
            corner = before[i - channels] if i >= channels else 0
            if how == 1:
                line[i] = (line[i] + left) & 255
            elif how == 2:
                line[i] = (line[i] + up) & 255
            elif how == 3:
                line[i] = (line[i] + (left + up) // 2) & 255
            elif how == 4:
                guess = left + up - corner
                distances = abs(guess - left), abs(guess - up), abs(guess - corner)
                nearest = (left, up, corner)[distances.index(min(distances))]
                line[i] = (line[i] + nearest) & 255
        rows.append(line)
        before = line
    return rows, channels


def luminance(colour):
    def linear(value):
        value /= 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(value) for value in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


# Contents of the page: size of each chart; texts, marks and cells with their positions in pixels.
LOOK = """(() => {
  const box = node => { const b = node.getBoundingClientRect(); return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}; };
  const rgb = text => (text.match(/[\\d.]+/g) || []).slice(0, 3).map(Number);
  const pictures = [...document.querySelectorAll('figure.plot svg')].map(svg => ({
    name: svg.getAttribute('aria-label'), box: box(svg),
    texts: [...svg.querySelectorAll('text')].map(text => ({label: text.textContent.trim(), box: box(text),
      size: parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width, colour: rgb(getComputedStyle(text).fill)})),
    marks: [...svg.querySelectorAll('.mark')].map(mark => ({label: mark.querySelector('title').textContent, box: box(mark), colour: rgb(getComputedStyle(mark).fill)})),
    front: svg.querySelectorAll('polyline.front').length, knee: [...svg.querySelectorAll('circle.knee')].map(box)[0] || null,
  }));
  return {width: document.documentElement.scrollWidth, inner: innerWidth, height: document.documentElement.scrollHeight,
    paper: rgb(getComputedStyle(document.body).backgroundColor), ink: rgb(getComputedStyle(document.body).color), pictures,
    maps: [...document.querySelectorAll('table.map')].map(map => [...map.querySelectorAll('.cell')].map(cell => ({label: cell.title, fits: cell.scrollWidth <= cell.clientWidth}))),
    rows: document.querySelectorAll('table.sortable tbody tr').length};
})()"""

COLUMN = """(() => { const table = document.querySelector('table.sortable'); const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex(head => head.textContent === %s);
  return {sort: heads[column].getAttribute('aria-sort'), values: [...table.tBodies[0].rows].map(row => row.cells[column].dataset.value ?? row.cells[column].textContent)}; })()"""


def overlap(a, b):
    across = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
    down = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
    return across > 1 and down > 3


def check_picture(picture, where, paper, shot):
    label = f"{where}, {picture['name']}"
    frame = picture["box"]
    assert frame["width"] > 250, f"{label}: {frame['width']} pixels wide"
    for text in picture["texts"]:
        inside = text["box"]["x"] >= frame["x"] - 1 and text["box"]["x"] + text["box"]["width"] <= frame["x"] + frame["width"] + 1
        assert inside, f"{label}: `{text['label']}` exceeds the chart"
        assert text["size"] >= 8.5, f"{label}: `{text['label']}` is {text['size']:.1f} pixels high"
        assert contrast(text["colour"], paper) >= 4.5, f"{label}: `{text['label']}` in {text['colour']} on {paper}"
    for place, one in enumerate(picture["texts"]):
        for other in picture["texts"][place + 1 :]:
            assert not overlap(one["box"], other["box"]), f"{label}: `{one['label']}` overlaps `{other['label']}`"
    rows, channels = shot
    own = 0
    for mark in picture["marks"]:
        x, y = (round(mark["box"][axis] + mark["box"][size] / 2) for axis, size in [("x", "width"), ("y", "height")])
        assert frame["x"] <= x <= frame["x"] + frame["width"], f"{label}: a mark is outside the chart"
        drawn = tuple(rows[y][x * channels : x * channels + 3])
        assert contrast(mark["colour"], paper) >= 1.7, f"{label}: marks in {mark['colour']} on {paper}"
        own += max(abs(a - b) for a, b in zip(drawn, mark["colour"])) < 40
        # Marks may overlap each other, and the ring around the knee may overlap any mark.
        ringed = picture["knee"] is not None and overlap(grown(picture["knee"]), mark["box"])
        hidden = ringed or any(other is not mark and overlap(grown(other["box"]), mark["box"]) for other in picture["marks"])
        is_seen = max(abs(a - b) for a, b in zip(drawn, mark["colour"])) < 40
        assert is_seen or hidden, f"{label}: the mark of {mark['label']} is drawn as {drawn}"
    assert own > 0 or not picture["marks"], f"{label}: no mark is visible"


def grown(box):
    return {"x": box["x"] - 3, "y": box["y"] - 3, "width": box["width"] + 6, "height": box["height"] + 6}


def check_front(picture, document, rows):
    """Checks that the ring of the knee is on the mark of the row that the JSON names."""
    knee = document["knee"]
    assert (picture["knee"] is None) == (knee is None), f"{picture['name']}: the knee"
    assert picture["front"] == (len(document["front"]) > 1), f"{picture['name']}: the front"
    if knee is not None:
        ring = picture["knee"]
        level = rows[knee]["axes"]["setting"]
        middle = ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2
        near = [
            mark
            for mark in picture["marks"]
            if abs(mark["box"]["x"] + mark["box"]["width"] / 2 - middle[0]) < 1
            and abs(mark["box"]["y"] + mark["box"]["height"] / 2 - middle[1]) < 1
        ]
        assert any(mark["label"].startswith(f"{level},") for mark in near), f"the ring is not around {level}"


def check_places(picture, points):
    """Checks that positions on the x axis are linear in the values."""
    marks = {mark["label"]: mark["box"]["x"] + mark["box"]["width"] / 2 for mark in picture["marks"]}
    found = sorted((speed, marks[label]) for label, speed in points if label in marks)
    assert len(found) >= 2, f"{picture['name']}: {len(found)} marks are identified"
    (low, begin), (high, end) = found[0], found[-1]
    for speed, x in found:
        expected = begin + (speed - low) / (high - low) * (end - begin) if high > low else begin
        assert abs(x - expected) < 1.5, f"{picture['name']}: {speed} is at {x}, not at {expected}"


def main():
    program, page = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    document = json.loads(page.with_suffix(".json").read_text())
    rows = document["rows"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            checks = look(browser, page, document, rows)
        finally:
            browser.close()
    print(f"{page.name}: {checks} charts checked, wide and narrow, light and dark; {len(rows)} rows sorted")


def look(browser, page, document, rows):
    checks = 0
    papers = []
    for name, width, height in WINDOWS:
        for theme in ["light", "dark"]:
            where = f"{name}, {theme}"
            browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=name == "phone")
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            browser.events.clear()
            browser.call("Page.navigate", url=page.as_uri())
            browser.wait_for("Page.loadEventFired")
            found = browser.evaluate(LOOK)
            for event in browser.events:
                if event["method"] == "Network.requestWillBeSent":
                    url = event["params"]["request"]["url"]
                    assert url.startswith("file:"), f"{where}: requests {url}"
                assert event["method"] not in ("Runtime.exceptionThrown", "Log.entryAdded"), f"{where}: {event['params']}"
            assert found["width"] <= found["inner"], f"{where}: {found['width']} pixels in a window of {found['inner']}"
            assert found["inner"] == width, f"{where}: a window of {found['inner']}"
            assert contrast(found["paper"], found["ink"]) >= 7, f"{where}: {found['ink']} on {found['paper']}"
            assert found["rows"] == len(rows), f"{where}: {found['rows']} of {len(rows)} rows"
            papers.append(tuple(found["paper"]))
            area = {"x": 0, "y": 0, "width": width, "height": found["height"], "scale": 1}
            shot = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=area)
            shot = pixels(base64.b64decode(shot["data"]))
            for picture in found["pictures"]:
                check_picture(picture, where, found["paper"], shot)
                checks += 1
            check_fronts(found["pictures"], document, rows)
            assert found["maps"] and all(found["maps"]), f"{where}: no heat map of layers"
            for cell in (cell for cells in found["maps"] for cell in cells):
                assert cell["label"] and cell["fits"], f"{where}: the cell `{cell['label']}`"
    light, dark = papers[0], papers[1]
    assert luminance(light) > 0.8 and luminance(dark) < 0.05, f"light on {light}, dark on {dark}"
    check_sorting(browser)
    return checks


def check_fronts(pictures, document, rows):
    kinds = {"simulated": "perplexity_against_planned_speed", "measured": "perplexity_against_measured_speed"}
    speeds = {
        "simulated": lambda row: (row["speed"]["planned"] or {}).get("tokens_per_second"),
        "measured": lambda row: row["speed"]["measured"]["tokens_per_second"]["median"],
    }
    for kind, key in kinds.items():
        ends = f"against tokens/s {'on this machine, ' if kind == 'measured' else ''}"
        of_kind = [p for p in pictures if p["name"].startswith("rise of perplexity against tokens/s") and p["name"].endswith(kind)]
        assert len(of_kind) == 1, f"{ends}: {len(of_kind)} pictures"
        picture = of_kind[0]
        check_front(picture, document[key], rows)
        # A mark's label begins with the row's setting and its hot neurons; it has both speeds.
        points = []
        for mark in picture["marks"]:
            for row in rows:
                speed = speeds[kind](row)
                if speed is not None and mark["label"].startswith(f"{row['axes']['setting']},") and matches(mark["label"], row):
                    points.append((mark["label"], speed))
                    break
        check_places(picture, points)


def matches(label, row):
    """Whether a mark's label belongs to a row: it has both speeds, formatted as on the page."""

    def written(speed):
        return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}" if speed >= 10 else f"{speed:.2f}"

    measured = written(row["speed"]["measured"]["tokens_per_second"]["median"])
    planned = row["speed"]["planned"]
    is_planned = planned is None or f" {written(planned['tokens_per_second'])} tokens/s predicted" in label
    return f" {measured} tokens/s on" in label and is_planned


def check_sorting(browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    for heading, key in [("tok/s simulated", float), ("perplexity", float), ("policy", str)]:
        script = COLUMN % json.dumps(heading)
        for expected in ["ascending", "descending"]:
            place = browser.evaluate(
                """(() => { const button = [...document.querySelectorAll('table.sortable th button')].find(one => one.textContent === %s);
                button.scrollIntoView({block: 'center', inline: 'center'}); const b = button.getBoundingClientRect();
                return [b.x + b.width / 2, b.y + b.height / 2]; })()"""
                % json.dumps(heading)
            )
            for kind in ["mousePressed", "mouseReleased"]:
                browser.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)
            found = browser.evaluate(script)
            assert found["sort"] == expected, f"{heading}: {found['sort']}, not {expected}"
            values = [key(value) if value != "" else float("-inf") for value in found["values"]]
            assert values == sorted(values, reverse=expected == "descending"), f"{heading}: {values}"


main()
