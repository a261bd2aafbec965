"""Attacks on `powerinfer serve` by clients that combine tricks. Each attack starts its own server, asks it for `/health`
throughout, and stops it with SIGTERM at the end.

attack_server.py combined   schemas, stop strings, pipelining and slow readers at the same time
attack_server.py held       1,024 connections: silent, slow heads, slow bodies, clients that read nothing; from up to 8 addresses
attack_server.py bombs      requests of many texts, prompts, biases, stop strings, properties and bytes

A finding is an answer of `/health` after more than 2 s or none, a status of 500, memory that grows by more than 1 GiB, or a
server that still runs 20 s after SIGTERM. Run by scripts/attack.sh in its work folder; POWERINFER is the program.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from attack import Findings, POWERINFER

HEALTH_LIMIT = 2.0
MEMORY_LIMIT = 1 << 30
STOP_LIMIT = 20.0
PATIENCE = 30.0


class Server:
    """A server whose health and memory are watched."""

    def __init__(self, findings, attack):
        self.findings, self.attack = findings, attack
        self.process = subprocess.Popen([POWERINFER, "-q", "serve", "base/bundle", "--port", "0", "--parallel", "4"],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.port = int(re.search(r":(\d+)$", self.process.stdout.readline().strip()).group(1))
        self.first = self.memory()
        # In a separate process: in this one, threads would delay each other.
        processes = multiprocessing.get_context("fork")
        self.is_over, (self.results, sender) = processes.Event(), processes.Pipe(duplex=False)
        self.watch = processes.Process(target=self.watch_health, args=(sender,))
        self.watch.start()

    def memory(self):
        try:
            status = open(f"/proc/{self.process.pid}/status").read()
            return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) << 10
        except (OSError, AttributeError):
            return 0

    def watch_health(self, sender):
        answers, most = [], 0
        while not self.is_over.is_set():
            started = time.monotonic()
            status = ask(self, request("GET", "/health"))
            most = max(most, self.memory())
            if not self.is_over.is_set() or status is not None:
                answers.append((status, time.monotonic() - started))
            self.is_over.wait(0.05)
        sender.send((answers, most))

    def stop(self):
        """Ends the server; reports problems with its end or its memory."""
        started = time.monotonic()
        self.is_over.set()
        last = self.memory()
        self.process.send_signal(signal.SIGTERM)
        finding = None
        try:
            self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            finding = f"it still runs {STOP_LIMIT:.0f} s after SIGTERM"
            self.process.kill()
            self.process.wait()
        stopped = time.monotonic() - started
        answers, most = self.results.recv()
        self.watch.join()
        for status, took in answers:
            slow = status != 200 or took > HEALTH_LIMIT
            self.findings.tried("`/health`", f"{self.attack}: {status} after {took:.1f} s" if slow else None)
        slowest, grown = max((took for _, took in answers), default=0.0), max(most, last) - self.first
        self.findings.tried("SIGTERM", finding)
        self.findings.tried("memory", f"it grew by {grown >> 20} MiB" if grown > MEMORY_LIMIT else None)
        print(f"{self.attack}: {len(answers)} times `/health`, the slowest after {1000 * slowest:.0f} ms; memory grew by {grown >> 20} MiB; "
              f"stopped after {stopped:.1f} s", file=sys.stderr, flush=True)


def request(method, path, body=None, length=None):
    data = b"" if body is None else json.dumps(body).encode()
    length = len(data) if length is None else length
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode() + data


def connect(server, address="127.0.0.1"):
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE, (address, 0))


def ask(server, message, patience=PATIENCE):
    """Status of the answer to a message; none without an answer."""
    try:
        with connect(server) as connection:
            connection.settimeout(patience)
            connection.sendall(message)
            return int(connection.recv(4096)[9:12])
    except (OSError, ValueError):
        return None


def properties(count, source):
    fields = {f"p{index}": {"type": "string", "pattern": f"^[a-z{source.randint(0, 9)}]{{1,{index % 50 + 1}}}$"} for index in range(count)}
    return {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": fields}}}


def trick(source):
    """A request that costs more than it should."""
    many = {"prompt": "x", "n": 128, "max_tokens": 8}
    return source.choice([
        lambda: many | {"response_format": properties(source.randint(10, 1500), source)},
        lambda: many | {"max_tokens": 60, "ignore_eos": True, "stop": ["s" * source.randint(100, 480)] * 32},
        lambda: many | {"max_tokens": 60, "ignore_eos": True, "stop": ["s" * source.randint(10_000, 250_000)] * 32},
        lambda: many | {"logit_bias": {str(index): 1 for index in range(source.choice([500, 400_000]))}},
        lambda: {"prompt": [""] * source.choice([2000, 3_000_000]), "max_tokens": 1},
        lambda: {"prompt": ["x y " * 15] * 2000, "n": source.choice([1, 128]), "max_tokens": 1, "logprobs": 20, "echo": True},
        lambda: {"prompt": [[5] * 40] * 2000, "max_tokens": 20, "logprobs": 20, "stream": True},
        lambda: {"prompt": [5] * source.choice([40, 3_000_000]), "max_tokens": 1},
        lambda: {"messages": [{"role": "user", "content": "</s>" * source.randint(1, 200_000)}], "max_tokens": 4},
        lambda: {"prompt": "x" * source.randint(1, 9 << 20), "max_tokens": 1},
    ])()


def tricks(server, findings, source, end):
    """Sends tricks one after the other, reads a little of the answers, and goes away."""
    while time.monotonic() < end:
        body = trick(source)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status = ask(server, request("POST", path, body), min(PATIENCE, max(1.0, end - time.monotonic())))
        findings.tried("requests", f"status 500 of {json.dumps(body)[:200]}" if status == 500 else None)


def non_reading(server, address="127.0.0.1"):
    """A client that keeps sending requests and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    connection.bind((address, 0))
    connection.connect(("127.0.0.1", server.port))
    connection.setblocking(False)
    long = {"prompt": "x", "max_tokens": 40, "n": 8, "stream": True, "ignore_eos": True}
    try:
        connection.send(request("POST", "/v1/completions", long) * 20 + request("GET", "/") * 2000)
    except OSError:
        pass
    return connection


def together(jobs):
    threads = [threading.Thread(target=job, args=arguments) for job, *arguments in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def combined(arguments, findings, source):
    server = Server(findings, "combined clients")
    end = time.monotonic() + arguments.seconds
    silent = [non_reading(server) for _ in range(20)]

    def slow_reader():
        while time.monotonic() < end:
            try:
                with connect(server) as connection:
                    connection.sendall(request("POST", "/v1/completions", {"prompt": "x", "n": 16, "max_tokens": 40, "stream": True, "ignore_eos": True}))
                    while time.monotonic() < end and connection.recv(20):
                        time.sleep(0.05)
            except OSError:
                pass

    jobs = [(tricks, server, findings, random.Random(source.random()), end) for _ in range(6)]
    together(jobs + [(slow_reader,)] * 4)
    server.stop()
    del silent


def held(arguments, findings, source):
    server = Server(findings, "held connections")
    end = time.monotonic() + arguments.seconds
    addresses = source.choice([1, 2, 8])
    open_connections = []
    for index in range(1024):
        address = f"127.0.0.{2 + index % addresses}"
        try:
            connection = non_reading(server, address) if index % 16 == 3 else connect(server, address)
            if index % 4 in (1, 2):
                whole = request("POST", "/v1/completions", None, 1000)
                connection.sendall(whole[: len(whole) if index % 4 == 2 else 30])
            open_connections.append(connection)
            findings.tried("connections")
        except OSError as error:
            findings.tried("connections", f"connection {index} of {addresses} addresses: {error}")
            break
    # Clients have half a second to send their requests before they give way to others.
    time.sleep(1)
    while time.monotonic() < end:
        # A byte now and then looks like a slow network.
        for connection in source.sample(open_connections, min(50, len(open_connections))):
            try:
                connection.send(b"x")
            except OSError:
                pass
        status = ask(server, request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}))
        findings.tried("requests", None if status in (200, 429) else f"among {len(open_connections)} held connections: {status}")
        time.sleep(0.2)
    server.stop()
    for connection in open_connections:
        connection.close()


def bombs(arguments, findings, source):
    server = Server(findings, "request bombs")
    end = time.monotonic() + arguments.seconds
    # 256 texts with 5 MB of JSON, which must not be copied for each text.
    biases = {"prompt": ["x", "y"], "n": 128, "max_tokens": 1, "logit_bias": {str(index): 1 for index in range(400_000)}}
    ask(server, request("POST", "/v1/completions", biases), arguments.seconds / 2)
    together([(tricks, server, findings, random.Random(source.random()), end) for _ in range(6)])
    server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["combined", "held", "bombs"])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if os.name == "posix":
        import resource
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    findings = Findings()
    globals()[arguments.attack](arguments, findings, random.Random(arguments.seed))
    names = {"combined": "combined clients", "held": "held connections", "bombs": "request bombs"}
    return findings.report(names[arguments.attack])


if __name__ == "__main__":
    sys.exit(main())
