"""Load on a server of OpenAI's completions API: throughput and latencies by the number of clients.

Each client sends one request after the other: a prompt of random tokens and an answer of a fixed length, streamed.
Prompts differ from each other, so that no prefix is reused. Prints a table in Markdown; `--json FILE` keeps the figures.
"""

import argparse
import asyncio
import json
import random
import time


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def complete(host, port, body, times):
    """Sends one request; appends the times of its request and of each chunk with text."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + data)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status!r} {await reader.read(2000)!r}")
    arrivals, is_done = [], False
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            is_done = True
        elif line.startswith(b"data: {"):
            arrivals.append(time.perf_counter())
    writer.close()
    if not is_done:
        raise SystemExit("a stream broke off")
    times.append((started, arrivals))


async def load(arguments, clients):
    """Runs `clients` clients; returns the times of their requests and the time of all."""
    random_source = random.Random(clients)
    low, high = arguments.prompt
    requests = []
    for _ in range(max(arguments.requests, clients * arguments.rounds)):
        length = random_source.randint(low, high)
        prompt = [random_source.randrange(arguments.first_token, arguments.vocabulary) for _ in range(length)]
        requests.append({
            "prompt": prompt, "max_tokens": arguments.tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        })
    times = []

    async def client():
        while requests:
            await complete(arguments.host, arguments.port, requests.pop(), times)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return times, time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=4, help="requests at least, of all clients")
    parser.add_argument("--rounds", type=int, default=1, help="requests of each client at least")
    parser.add_argument("--prompt", type=int, nargs=2, default=[128, 512], help="tokens of a prompt, from and to")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--first-token", type=int, default=3, help="ids below are special tokens")
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    rows = []
    print("| clients | tokens/s of all | first token p50 / p95 / p99, ms | between tokens p50 / p95 / p99, ms |")
    print("|--:|--:|--:|--:|", flush=True)
    for clients in arguments.clients:
        times, wall = asyncio.run(load(arguments, clients))
        first = [1000 * (arrivals[0] - started) for started, arrivals in times]
        between = [1000 * (b - a) for _, arrivals in times for a, b in zip(arrivals, arrivals[1:])]
        spread = lambda values: [percentile(values, share) for share in (0.5, 0.95, 0.99)]
        row = {
            "clients": clients, "requests": len(times), "tokens_per_second": len(times) * arguments.tokens / wall,
            "first_token_ms": spread(first), "between_tokens_ms": spread(between),
        }
        rows.append(row)
        text = [" / ".join(f"{value:.1f}" for value in row[name]) for name in ("first_token_ms", "between_tokens_ms")]
        print(f"| {clients} | {row['tokens_per_second']:.0f} | {text[0]} | {text[1]} |", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
