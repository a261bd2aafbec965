"""Load on a server of OpenAI's completions API, over the loopback. Prints Markdown.

bench_server.py load PORT      throughput and latencies by the number of clients
bench_server.py overhead PORT  decoding through the server, in turn with `powerinfer run`
bench_server.py soak PORT      64 clients for minutes, whose answers are compared with those that each gets alone
"""

import argparse
import asyncio
import json
import random
import shlex
import statistics
import subprocess
import time

HOST = "127.0.0.1"


async def send(port, body, method="POST", path="/v1/completions"):
    """Sends a request; returns its reader and writer, after the head of the response."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 22)
    data = json.dumps(body).encode() if body else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status!r} {await reader.read(2000)!r}")
    while await reader.readline() not in (b"\r\n", b""):
        pass
    return reader, writer


async def complete(port, body, pause=0.0, chunks=None):
    """Returns the text, and the time of each chunk since the request; after `chunks` of them the client goes away."""
    started = time.perf_counter()
    reader, writer = await send(port, body)
    text, times, is_done = "", [], not body.get("stream")
    if is_done:
        data = await reader.read()
        # The body may come in chunks, whose lengths are on lines of their own.
        text = json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])["choices"][0]["text"]
        times.append(time.perf_counter() - started)
    else:
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: {"):
                times.append(time.perf_counter() - started)
                text += json.loads(line[6:])["choices"][0]["text"]
                if pause:
                    await asyncio.sleep(pause)
            if chunks and len(times) == chunks:
                break
    writer.close()
    if not is_done and not chunks:
        raise SystemExit("a stream broke off")
    return text, times


def percentiles(values):
    values = sorted(values)
    chosen = [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.95, 0.99)]
    return " / ".join(f"{1000 * value:.1f}" for value in chosen)


def prompt(arguments, source):
    low, high = arguments.prompt
    return [source.randrange(arguments.first_token, arguments.vocabulary) for _ in range(source.randint(low, high))]


async def load(arguments):
    """Each client sends one request after the other; prompts differ, so that no prefix is reused."""
    print("| clients | tokens/s of all | first token p50 / p95 / p99, ms | between tokens p50 / p95 / p99, ms |")
    print("|--:|--:|--:|--:|", flush=True)
    for clients in arguments.clients:
        source = random.Random(clients)
        count = max(arguments.requests, clients * arguments.rounds)
        bodies = [
            {"prompt": prompt(arguments, source), "max_tokens": arguments.tokens, "temperature": 0, "stream": True, "ignore_eos": True}
            for _ in range(count)
        ]
        results = []

        async def client():
            while bodies:
                results.append((await complete(arguments.port, bodies.pop()))[1])

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        speed = count * arguments.tokens / (time.perf_counter() - started)
        first = percentiles([times[0] for times in results])
        between = percentiles([b - a for times in results for a, b in zip(times, times[1:])])
        print(f"| {clients} | {speed:.0f} | {first} | {between} |", flush=True)


async def overhead(arguments):
    """Decoding of one request, in turn with `powerinfer run` on the same prompt."""
    body = {"prompt": arguments.text, "max_tokens": arguments.tokens, "temperature": 0}
    ways = {"`run`": [], "whole": [], "streamed": []}
    for _ in range(arguments.requests):
        command = [*shlex.split(arguments.run), "--json", "--quiet", "--prompt", arguments.text, "--max-tokens", str(arguments.tokens)]
        ran = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        ways["`run`"].append(ran["decode_tokens_per_second"])
        for way, stream in [("whole", False), ("streamed", True)]:
            # As `run` counts: all tokens, by the time after the prompt, which is cached from the second request on.
            _, first = await complete(arguments.port, body | {"stream": stream, "max_tokens": 1})
            _, first = await complete(arguments.port, body | {"stream": stream, "max_tokens": 1})
            text, times = await complete(arguments.port, body | {"stream": stream})
            expected = ran["completion"].removeprefix(ran["prompt"])
            assert text == expected, f"the server answers {text!r}, `run` {expected!r}"
            ways[way].append(ran["generated_tokens"] / (times[-1] - first[-1]))
    print("| | tokens/s | relative to `run` |\n|:--|--:|--:|")
    base = statistics.median(ways["`run`"])
    for way, speeds in ways.items():
        speed = statistics.median(speeds)
        print(f"| {way} | {speed:.0f} | {100 * (speed / base - 1):+.1f}% |")
    # A prompt of one token, of which nothing is cached: the server, a connection and one pass.
    first = []
    for token in range(arguments.first_token, arguments.first_token + 200):
        _, times = await complete(arguments.port, {"prompt": [token], "max_tokens": 1, "stream": True, "ignore_eos": True})
        first.append(times[0])
    print(f"\nFirst token after a prompt of one token: {percentiles(first)} ms (p50 / p95 / p99), a pass of {1000 / base:.2f} ms included.", flush=True)


async def soak(arguments):
    """Clients that read slowly, go away or behave, for minutes; each text is compared with what the client gets alone."""
    source = random.Random(0)
    bodies, texts = [], []
    for index in range(32):
        tokens = prompt(arguments, source)
        if index % 2:
            # Part of the one before, so that caches of prefixes are used.
            before = bodies[-1]["prompt"]
            tokens = before[: source.randint(len(before) // 2, len(before))] + tokens[: source.randint(1, 4)]
        body = {"prompt": tokens, "max_tokens": source.randint(1, arguments.tokens), "seed": index, "ignore_eos": True}
        bodies.append(body | {"temperature": 0.8 * (index % 2), "stream": index % 4 > 0})
        texts.append((await complete(arguments.port, bodies[-1]))[0])
    end = time.monotonic() + arguments.seconds
    counts, memory = {"compared": 0, "gone": 0, "slow": 0, "connects": 0}, []

    async def client():
        while time.monotonic() < end:
            index, kind = source.randrange(len(bodies)), source.random()
            if kind < 0.05 and bodies[index]["stream"]:
                await complete(arguments.port, bodies[index], chunks=source.randint(1, 8))
                counts["gone"] += 1
                continue
            text, _ = await complete(arguments.port, bodies[index], pause=0.05 if kind > 0.97 else 0.0)
            counts["slow"] += kind > 0.97
            assert text == texts[index], f"request {index}: {text!r}, alone {texts[index]!r}"
            counts["compared"] += 1

    async def connects():
        while time.monotonic() < end:
            _, writer = await asyncio.open_connection(HOST, arguments.port)
            if counts["connects"] % 3 == 1:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            writer.close()
            counts["connects"] += 1
            await asyncio.sleep(arguments.seconds / 11_000)

    async def watch():
        while time.monotonic() < end:
            status = open(f"/proc/{arguments.pid}/status").read()
            memory.append(int(status.split("VmRSS:")[1].split()[0]) / 1024)
            await asyncio.sleep(min(5, arguments.seconds / 20))

    await asyncio.gather(watch(), connects(), *(client() for _ in range(arguments.clients[-1])))
    reader, _ = await send(arguments.port, None, "GET", "/health")
    assert b'"ok"' in await reader.read(), "the server is not well"
    fifth = max(1, len(memory) // 5)
    print(
        f"{arguments.clients[-1]} clients for {arguments.seconds} s: {counts['compared']} texts, each equal to that of the same request alone; "
        f"{counts['gone']} clients went away in the middle, {counts['slow']} read slowly; {counts['connects']} other connections were opened "
        f"and closed. Resident memory: {statistics.mean(memory[fifth:2 * fifth]):.0f} MiB in the second fifth of the time, "
        f"{statistics.mean(memory[-fifth:]):.0f} MiB in the last.",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["load", "overhead", "soak"])
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=8, help="requests of all clients, at least; repeats of `overhead`")
    parser.add_argument("--rounds", type=int, default=1, help="requests of each client, at least")
    parser.add_argument("--prompt", type=int, nargs=2, default=[128, 512], help="tokens of a prompt, from and to")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--first-token", type=int, default=3, help="ids below are special tokens")
    parser.add_argument("--run", default="powerinfer run", help="command of `overhead`")
    parser.add_argument("--text", default="def answer(values):\n    \"\"\"", help="prompt of `overhead`")
    parser.add_argument("--seconds", type=int, default=600, help="time of `soak`")
    parser.add_argument("--pid", default="self", help="process of the server, whose memory `soak` watches")
    arguments = parser.parse_args()
    asyncio.run({"load": load, "overhead": overhead, "soak": soak}[arguments.mode](arguments))


if __name__ == "__main__":
    main()
