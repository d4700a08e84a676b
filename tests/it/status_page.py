"""Opens the status page in headless Chromium, and prints what a user of it would notice, as JSON.

Usage: status_page.py CHROMIUM URL FOLDER VARIANT...

A variant is a colour scheme and a width, such as dark-375. For each one: a screenshot in FOLDER, messages of
the console, requested addresses, the width of the contents, what axe-core finds, the figures that are shown,
and what the Tab key reaches.
"""

import base64
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from websockets.sync.client import connect

LIMIT = 30.0
SCROLL_LIMIT = 5.0
# All rules of WCAG 2.2 at the levels A and AA, and axe-core's advice.
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SHOWN = "document.querySelectorAll('data[data-series]').length > 0"
EVENTS = "[...document.querySelectorAll('#events tbody tr')].map((row) => row.cells[1].textContent)"
FIGURES = """[...document.querySelectorAll('data')].map((data) => ({
    series: data.dataset.series ?? null, value: data.value, text: data.textContent,
    section: data.closest('section')?.ariaLabel ?? null,
    row: data.closest('tr')?.cells[0].textContent ?? null,
    title: data.closest('dl div')?.querySelector('dt').textContent ?? null,
}))"""
# Contrast can be computed only for what no folding or scrolling hides. The page draws its tables again and again, so
# their own styles would be lost.
UNHIDDEN = """for (const node of document.querySelectorAll('details')) node.open = true;
const sheet = new CSSStyleSheet();
sheet.replaceSync(`.scroll { max-height: none !important; overflow: visible !important; }
    thead th { position: static !important; }`);
document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];"""
# What the page says of its state: the chips with their colours, and the sentences.
STATE = """(() => {
    const chips = [...document.querySelectorAll('.chip')].map((chip) => {
        const before = getComputedStyle(chip, '::before').content.replace('none', '').replaceAll('"', '');
        return [before + chip.textContent, getComputedStyle(chip).color];
    });
    return { chips, problems: [...document.querySelectorAll('#problems li')].map((li) => li.textContent) };
})()"""
MUTED = "getComputedStyle(document.querySelector('dt')).color"
# The lower ends of axes for shares, and a time, which must not depend on the zone of the browser.
VALUES = "[lowest([]), lowest([0.96, 0.995]), lowest([0.3]), utc(0)]"
FOCUSED = """(() => {
    const node = document.activeElement, box = node.getBoundingClientRect(), style = getComputedStyle(node);
    return {
        tag: node.tagName, name: node.getAttribute('aria-label') ?? node.textContent,
        outline: style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth),
        inView: box.bottom > 0 && box.top < innerHeight && box.right > 0,
    };
})()"""


class Browser:
    """A browser with one tab, by its DevTools protocol."""

    def __init__(self, program: str, folder: str) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--no-first-run", "--no-proxy-server"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([program, *flags], stdin=quiet, stdout=quiet, stderr=quiet)
        port_file = pathlib.Path(folder, "DevToolsActivePort")
        wait(lambda: port_file.exists() and port_file.read_text().count("\n") >= 1, "the browser has started")
        port, path = port_file.read_text().split("\n")[:2]
        self.address, self.sent, self.events, self.session = f"ws://127.0.0.1:{port}{path}", 0, [], None

    def attach(self, socket) -> None:
        """Opens the tab. The browser is talked to over this connection."""
        self.socket = socket
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: object) -> dict:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=LIMIT))
            if answer.get("id") != self.sent:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def evaluate(self, expression: str) -> object:
        flags = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=expression, **flags)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def wait(condition, what: str) -> None:
    until = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.05)


def tab_through(browser: Browser) -> list:
    """What the Tab key reaches, until it has gone around."""
    reached = []
    browser.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    for _ in range(200):
        browser.press("Tab", 9)
        # A slow browser may scroll to what has the focus only after it has answered.
        until = time.monotonic() + SCROLL_LIMIT
        while not (focused := browser.evaluate(FOCUSED))["inView"] and time.monotonic() < until:
            time.sleep(0.05)
        if focused["tag"] == "BODY":
            break
        reached.append(focused)
    return reached


def toggled_by_keyboard(browser: Browser) -> bool:
    """Whether the Enter key opens and closes a folded part."""
    opened = "document.querySelector('details').open"
    browser.evaluate("document.querySelector('summary').focus()")
    states = [browser.evaluate(opened)]
    for _ in range(2):
        browser.press("Enter", 13, "\r")
        states.append(browser.evaluate(opened))
    return states == [states[0], not states[0], states[0]]


def cut_off(browser: Browser) -> dict:
    """What the page says when it gets no answer any more."""
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.call("Network.emulateNetworkConditions", offline=True, **conditions)
    wait(lambda: browser.evaluate("failure") != "", "the page has no connection")
    browser.evaluate("showState()")
    state = browser.evaluate(STATE) | {"muted": browser.evaluate(MUTED)}
    browser.call("Network.emulateNetworkConditions", offline=False, **conditions)
    return state


def brief(rules: list) -> list:
    """What axe-core says, one line for each element."""
    lines = []
    for rule in rules:
        for node in rule["nodes"]:
            lines.append(f"{rule['id']}: {node['html'][:200]}: {node.get('failureSummary', '')}")
    return lines


def look(browser: Browser, url: str, folder: str, variant: str, axe: str) -> dict:
    scheme, width = variant.split("-")
    size = {"width": int(width), "height": 800, "deviceScaleFactor": 1, "mobile": width == "375"}
    browser.events.clear()
    for domain in ["Page", "Runtime", "Log", "Network"]:
        browser.call(f"{domain}.enable")
    # Without smooth scrolling, what has the focus is in view at once.
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in features.items()]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    browser.call("Page.navigate", url=url)
    wait(lambda: browser.evaluate(SHOWN), f"{url} shows figures")
    found = {"variant": variant, "figures": browser.evaluate(FIGURES)}
    found["overflow"] = browser.evaluate("document.documentElement.scrollWidth - innerWidth")
    found["problems"] = browser.evaluate("document.getElementById('problems').innerText")
    found["events"] = browser.evaluate(EVENTS)
    found["state"], found["values"] = browser.evaluate(STATE), browser.evaluate(VALUES)
    found["events_top"] = browser.evaluate("document.getElementById('events').offsetTop")
    found["scrolls"] = browser.evaluate("document.querySelector('#events .scroll').className")
    found["plots"] = browser.evaluate("[...document.querySelectorAll('svg')].map((svg) => svg.ariaLabel)")
    height = browser.evaluate("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": int(width), "height": height, "scale": 1}
    shot = browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    pathlib.Path(folder, f"{variant}.png").write_bytes(base64.b64decode(shot["data"]))
    # The policy for contents holds for the page's own scripts, not for those of DevTools.
    browser.evaluate(axe)
    browser.evaluate(UNHIDDEN)
    # A page that is hidden draws nothing new, so that no element moves while it is examined.
    browser.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    run = f"axe.run(document, {{ runOnly: {json.dumps(TAGS)} }})"
    audit = browser.evaluate(f"{run}.then(({{ violations, incomplete }}) => ({{ violations, incomplete }}))")
    browser.evaluate("delete document.hidden")
    found["violations"], found["incomplete"] = brief(audit["violations"]), brief(audit["incomplete"])
    found["reached"], found["toggled"] = tab_through(browser), toggled_by_keyboard(browser)

    def of(method: str) -> list:
        return [event["params"] for event in browser.events if event.get("method") == method]

    found["console"] = of("Runtime.exceptionThrown") + of("Runtime.consoleAPICalled") + of("Log.entryAdded")
    found["requests"] = sorted({sent["request"]["url"] for sent in of("Network.requestWillBeSent")})
    found["cut_off"] = cut_off(browser)
    return found


def main() -> None:
    program, url, folder, *variants = sys.argv[1:]
    package = os.path.dirname(importlib.util.find_spec("axe_playwright_python").origin)
    axe = pathlib.Path(package, "axe.min.js").read_text()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            with connect(browser.address, max_size=None, open_timeout=LIMIT) as socket:
                browser.attach(socket)
                print(json.dumps([look(browser, url, folder, variant, axe) for variant in variants]))
        finally:
            browser.end()


if __name__ == "__main__":
    main()
