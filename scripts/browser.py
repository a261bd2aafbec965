"""A headless Chromium with one page, driven by the Chrome DevTools Protocol over a pipe; needs only Python."""

import json
import os
import subprocess


class Browser:
    """A headless browser with one page."""

    def __init__(self, program, profile):
        # The browser reads commands from file descriptor 3 and replies on 4.
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()

        def descriptors():
            # Duplicated first, since either may already be descriptor 3 or 4.
            reads, writes = os.dup(to_browser), os.dup(from_browser)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        arguments = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        arguments += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            arguments, close_fds=False, preexec_fn=descriptors, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self.writer, self.reader = from_us, to_us
        self.buffer, self.number, self.session = b"", 0, None
        self.events = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ["Page", "Network", "Runtime", "Log"]:
            self.call(f"{domain}.enable")

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.reader, 1 << 20)
            if not piece:
                raise SystemExit("the browser has exited")
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def wait_for(self, method):
        while not any(event["method"] == method for event in self.events):
            answer = self.receive()
            if "method" in answer:
                self.events.append(answer)

    def evaluate(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise SystemExit(f"{script[:60]}…: {found['exceptionDetails']}")
        return found["result"].get("value")

    def close(self):
        self.process.terminate()
        self.process.wait()
