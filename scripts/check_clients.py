"""Checks `powerinfer serve` with clients of OpenAI's API.

usage: check_clients.py POWERINFER DEMO_CHECKPOINT

The working folder holds `demo.powerinfer`, prepared of DEMO_CHECKPOINT, and `chat.powerinfer`, a model with a chat template.
Prints a line per check. Exits with 1 at the first difference, after printing what was expected and found.
"""

import asyncio
import contextlib
import gzip
import json
import logging
import math
import os
import pathlib
import struct
import subprocess
import sys
import typing

# The harness reads local files only.
os.environ |= {
    "HF_HOME": str(pathlib.Path("hugging-face").resolve()),
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "OPENAI_API_KEY": "secret",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}

import jsonschema
import lm_eval
import lm_eval.tasks
import numpy
import openai
import pydantic

KEY = "secret"
PROMPT = "def add(a, b):\n    "
NO_TEMPLATE = "the model has no chat template; use `/v1/completions` or `/api/generate`, which continue a text"
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 2},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
QUESTIONS = 8


class Place(pydantic.BaseModel):
    """Part of `Point`, which makes the client send a schema with a reference."""

    kind: typing.Literal["sea", "land"]
    is_far: bool


class Point(pydantic.BaseModel):
    """An answer in a chat."""

    place: Place
    height: int = pydantic.Field(ge=-9, le=9)
    note: str | None = pydantic.Field(max_length=4)



# The context ends without a space and the choice begins with one, so that no token and no space crosses from one to the other.
MULTIPLE_CHOICE = """\
task: choices
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
"""
GENERATION = """\
task: bodies
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.jsonl}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[label]}}"
target_delimiter: ""
generation_kwargs: {until: ["return"], max_gen_toks: 24, temperature: 0, do_sample: false}
metric_list:
  - metric: exact_match
"""
TEXTS = """\
task: texts
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.jsonl}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}{{choices[label]}}"
metric_list:
  - metric: bits_per_byte
"""


def check(name, found, expected=True):
    """Prints the check's name, or ends the program where `found` is not as expected."""
    if found != expected:
        print(f"FAILED: {name}\n  expected: {expected!r}\n  found:    {found!r}")
        sys.exit(1)
    print(f"ok: {name}", flush=True)


def refused(error, call):
    """Status, code, parameter and message of the error that `call` must raise."""
    try:
        call()
    except error as raised:
        return raised.status_code, raised.code, raised.param, raised.body["message"]
    except openai.OpenAIError as raised:
        return repr(raised)
    return f"no {error.__name__}"


class PowerInfer:
    """The program under test."""

    def __init__(self, program):
        self.program = program

    def output(self, *arguments, text=None):
        """What a command prints."""
        result = subprocess.run([self.program, "-q", *arguments], input=text, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"`powerinfer {' '.join(arguments)}` failed: {result.stderr}")
        return result.stdout

    @contextlib.contextmanager
    def serve(self, bundle, *arguments):
        """A server of `bundle` at a free port, stopped at the end; the value is its address."""
        command = [self.program, "-q", "serve", bundle, "--port", "0", "--device", "cpu", *arguments]
        with open("server.log", "w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = process.stdout.readline()
            begin = "listening on "
            if not line.startswith(begin):
                sys.exit(f"`serve {bundle}` printed {line!r}: {pathlib.Path('server.log').read_text()}")
            yield line.removeprefix(begin).strip()
        finally:
            process.terminate()
            process.wait(timeout=60)

    def ids(self, text):
        """Token ids of `text`, with special tokens."""
        return json.loads(self.output("tokenize", "demo", text=text))

    def log_likelihood(self, context, choice):
        """Log-likelihood of `choice` after `context`, of the logits that `powerinfer logits` writes."""
        given, ids = self.ids(context), self.ids(context + choice)
        assert ids[: len(given)] == given, f"a token crosses the end of {context!r}"
        self.output("logits", "demo.powerinfer", "--device", "cpu", "--ids", ",".join(map(str, ids)), "--out", "logits.safetensors")
        data = pathlib.Path("logits.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        tensor = json.loads(data[8 : 8 + length])["logits"]
        start, end = tensor["data_offsets"]
        rows = numpy.frombuffer(data[8 + length + start : 8 + length + end], "<f4").reshape(tensor["shape"])
        scores = []
        for row, target in list(zip(rows, ids[1:]))[len(given) - 1 :]:
            logits = [float(logit) for logit in row]
            largest, total = max(logits), 0.0
            for logit in logits:
                total += math.exp(logit - largest)
            scores.append(logits[target] - (largest + math.log(total)))
        return sum(scores)


def check_completions(client):
    complete = lambda **more: client.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | more)
    check("openai: the model is listed", [model.id for model in client.models.list()], ["demo"])
    check("openai: a model by its name", client.models.retrieve("demo").id, "demo")
    greedy = complete()
    text = greedy.choices[0].text
    check("openai: a completion of 12 tokens", (greedy.usage.completion_tokens, greedy.choices[0].finish_reason, text != ""), (12, "length", True))
    usage = greedy.usage
    check("openai: tokens add up", usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    listed = complete(prompt=[PROMPT, "def f(x):"])
    check("openai: a list of texts", [(choice.index, choice.text == text) for choice in listed.choices], [(0, True), (1, False)])
    ids = json.loads(powerinfer.output("tokenize", "demo", text=PROMPT))
    check("openai: token ids", complete(prompt=ids).choices[0].text, text)
    check("openai: lists of token ids", [choice.text for choice in complete(prompt=[ids, ids]).choices], [text, text])
    sample = {"temperature": 1, "seed": 7}
    several = complete(n=3, **sample)
    texts = [choice.text for choice in several.choices]
    check("openai: `n` texts that differ", (len(texts), len(set(texts)) > 1, [choice.index for choice in several.choices]), (3, True, [0, 1, 2]))
    check("openai: the same seed, the same texts", [choice.text for choice in complete(n=3, **sample).choices], texts)
    check("openai: another seed, other texts", [choice.text for choice in complete(n=3, **sample | {"seed": 8}).choices] != texts)
    mean = lambda choice: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
    scored = complete(n=4, logprobs=0, **sample).choices
    best = complete(n=2, best_of=4, logprobs=0, **sample)
    expected = [choice.text for choice in sorted(scored, key=mean, reverse=True)[:2]]
    check("openai: `best_of` 4 are the 2 most probable", [choice.text for choice in best.choices], expected)
    check("openai: `best_of` counts all tokens", best.usage.completion_tokens, sum(len(choice.logprobs.tokens) for choice in scored))

    echoed = complete(echo=True, logprobs=2).choices[0]
    scores = echoed.logprobs
    lengths = {len(scores.tokens), len(scores.token_logprobs), len(scores.top_logprobs), len(scores.text_offset)}
    check("openai: `echo` begins with the prompt", echoed.text, PROMPT + text)
    check("openai: `echo` scores each token of prompt and text", lengths, {usage.total_tokens})
    check("openai: the first token has no score", (scores.token_logprobs[0], scores.top_logprobs[0]), (None, None))
    check("openai: text after the first token joins to the whole", "".join(scores.tokens[1:]), echoed.text)
    ends = scores.text_offset[2:] + [len(echoed.text)]
    pieces = [echoed.text[start:end] for start, end in zip(scores.text_offset[1:], ends)]
    check("openai: `text_offset` is where a token begins", pieces, scores.tokens[1:])
    pairs = zip(scores.token_logprobs[-12:], scores.top_logprobs[-12:])
    check("openai: greedy tokens are the most probable", all(score == max(top.values()) for score, top in pairs))
    shares = [sum(math.exp(score) for score in top.values()) for top in scores.top_logprobs[1:]]
    check("openai: probabilities of the most probable tokens are at most 1", all(0 < share <= 1 + 1e-9 for share in shares))
    silent = complete(echo=True, logprobs=2, max_tokens=0).choices[0]
    check("openai: `echo` without a new token", (silent.text, silent.logprobs.token_logprobs), (PROMPT, scores.token_logprobs[:-12]))

    stop = text[4:7]
    stopped = complete(stop=[stop, "never"]).choices[0]
    check("openai: `stop` ends the text before it", (stopped.text, stopped.finish_reason), (text[: text.index(stop)], "stop"))
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    check("openai: chunks join to the text", "".join(chunk.choices[0].text for chunk in chunks[:-1]), text)
    check("openai: one chunk has a reason to finish", [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason], ["length"])
    check("openai: the last chunk has the usage alone", (chunks[-1].choices, chunks[-1].usage.model_dump() | {"prompt_tokens_details": None}), ([], usage.model_dump() | {"prompt_tokens_details": None}))
    check("openai: the chunks before have none", {chunk.usage for chunk in chunks[:-1]}, {None})
    streamed = list(complete(stream=True, n=2, **sample))
    joined = ["".join(chunk.choices[0].text for chunk in streamed if chunk.choices[0].index == index) for index in range(2)]
    check("openai: a stream of 2 texts", joined, texts[:2])
    answer = complete(max_tokens=100, extra_body={"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}})
    check_schema("openai: a completion satisfies the JSON schema", answer.choices[0].text, answer.choices[0].finish_reason)


async def check_together(base_url):
    """Checks requests that are decoded in one batch, and one that its client leaves."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        complete = lambda prompt, **more: client.completions.create(model="demo", prompt=prompt, max_tokens=20, temperature=0, **more)
        prompts = [f"def f{index}(values):" for index in range(8)]
        alone = [(await complete(prompt)).choices[0].text for prompt in prompts]
        left = await complete(PROMPT, stream=True, extra_body={"ignore_eos": True, "max_tokens": 400})
        await anext(aiter(left))
        together = [answer.choices[0].text for answer in await asyncio.gather(*map(complete, prompts))]
        check("openai: 8 requests at a time get the texts that each gets alone", together, alone)
        await left.close()
        check("openai: after a stream is closed the next request is answered", (await complete(prompts[0])).choices[0].text, alone[0])


def check_schema(name, text, reason):
    """Checks that `text` is JSON that satisfies the schema."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        check(name, f"{text!r}: {error}", "JSON that satisfies the schema")
    check(name, reason, "stop")


def check_errors(client, base_url):
    complete = lambda **more: lambda: client.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 4} | more)
    message = "unknown parameter `colour`; leave it out"
    found = refused(openai.BadRequestError, complete(extra_body={"colour": 1}))
    check("openai: an unknown parameter", found, (400, "unknown_parameter", "colour", message))
    message = "the model `other` is not served here; `demo` is (`powerinfer serve --alias` sets its name)"
    found = refused(openai.NotFoundError, complete(model="other"))
    check("openai: an unknown model", found, (404, "model_not_found", "model", message))
    found = refused(openai.NotFoundError, lambda: client.models.retrieve("other"))
    check("openai: an unknown model, looked up", found, (404, "model_not_found", "model", message))
    found = refused(openai.BadRequestError, complete(temperature=3))
    check("openai: a value out of range", found, (400, "invalid_value", "temperature", "`temperature`: 3 is not between 0 and 2"))
    found = refused(openai.BadRequestError, complete(suffix="x"))
    check("openai: an unsupported parameter", found, (400, "unsupported_parameter", "suffix", "`suffix` is not supported; leave it out"))
    found = refused(openai.BadRequestError, complete(prompt="long " * 1000))
    check("openai: a prompt longer than the context", found[:2], (400, "context_length_exceeded"))
    found = refused(openai.AuthenticationError, lambda: openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list())
    message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
    check("openai: a wrong key", found, (401, "invalid_api_key", None, message))
    messages = [{"role": "user", "content": "hello"}]
    found = refused(openai.BadRequestError, lambda: client.chat.completions.create(model="demo", messages=messages))
    check("openai: a chat with a model without a chat template", found, (400, None, None, NO_TEMPLATE))


def check_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    chat = lambda **more: client.chat.completions.create(**{"model": "chat", "messages": messages, "max_completion_tokens": 10, "temperature": 0} | more)
    answer = chat()
    text = answer.choices[0].message.content
    found = (answer.object, answer.choices[0].message.role, answer.usage.completion_tokens, answer.choices[0].finish_reason, answer.choices[0].logprobs)
    check("openai: a chat of 10 tokens", found, ("chat.completion", "assistant", 10, "length", None))
    parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]}]
    check("openai: a message in parts", chat(messages=parts).choices[0].message.content, text)
    check("openai: the role `developer`", chat(messages=[messages[0] | {"role": "developer"}, messages[1]]).choices[0].message.content, text)
    longer = chat(messages=messages + [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}])
    check("openai: a longer conversation has a longer prompt", longer.usage.prompt_tokens > answer.usage.prompt_tokens)
    scores = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    check("openai: `top_logprobs` of each token of a chat", [len(score.top_logprobs) for score in scores], [3] * 10)
    check("openai: greedy tokens of a chat are the most probable", [score.logprob for score in scores], [max(top.logprob for top in score.top_logprobs) for score in scores])
    joined = b"".join(bytes(score.bytes) for score in scores).decode(errors="replace")
    check("openai: bytes of a chat's tokens join to its text", joined.lstrip(), text.lstrip())
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    check("openai: a chat's stream begins with the role", chunks[0].choices[0].delta.role, "assistant")
    check("openai: chunks of a chat join to its text", "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]), text)
    check("openai: a chat's last chunks are the reason and the usage", (chunks[-2].choices[0].finish_reason, chunks[-1].choices, chunks[-1].usage.total_tokens), ("length", [], answer.usage.total_tokens))
    sample = {"temperature": 1, "seed": 3, "n": 2}
    texts = [choice.message.content for choice in chat(**sample).choices]
    check("openai: the same seed, the same answers", ([choice.message.content for choice in chat(**sample).choices], len(set(texts))), (texts, 2))
    for name, temperature in ("greedy", 0), ("sampled", 1):
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
        choice = chat(response_format=schema, temperature=temperature, seed=5, max_completion_tokens=150).choices[0]
        check_schema(f"openai: a {name} answer satisfies the JSON schema", choice.message.content, choice.finish_reason)
    parsed = client.chat.completions.parse(model="chat", messages=messages, temperature=0, max_completion_tokens=150, response_format=Point)
    check("openai: an answer parsed as a pydantic class", type(parsed.choices[0].message.parsed), Point)
    found = refused(openai.BadRequestError, lambda: chat(messages=[messages[1], messages[1]]))
    check("openai: what the chat template refuses", found[:3] + ("roles must alternate" in found[3],), (400, "invalid_value", "messages", True))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    found = refused(openai.BadRequestError, lambda: chat(tools=tools))
    check("openai: tools", found, (400, "unsupported_parameter", "tools", "`tools` is not supported; leave it out"))


def check_curl(address):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True})
    command = ["curl", "-sSN", "--noproxy", "*", f"{address}/v1/completions", "-H", f"Authorization: Bearer {KEY}", "-d", body]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    arrivals = []
    while data := os.read(process.stdout.fileno(), 1 << 16):
        arrivals.append(data)
    check("curl: it succeeds", process.wait(), 0)
    events = b"".join(arrivals).decode().strip("\n").split("\n\n")
    check("curl: each event is a `data:` line", [event for event in events if not event.startswith("data: ") or "\n" in event], [])
    check("curl: the last event", events[-1], "data: [DONE]")
    check("curl: an event per piece of text", len(events) > 150)
    # How many arrive together depends on the machine; all at once would be a response that is not streamed.
    check("curl: they arrive one by one", len(arrivals) > 5)


def write_questions(checkpoint):
    """Questions of held-out functions: which of three bodies belongs to a description. A short one may be likelier, and not per byte."""
    with gzip.open(checkpoint / "held-out.jsonl.gz", "rt") as file:
        rows = [json.loads(file.readline()) for _ in range(QUESTIONS + 2)]
    questions = []
    for index, row in enumerate(rows[:QUESTIONS]):
        body, label = row["solution"], index % 3
        choices = [other["solution"] for other in rows[index + 1 : index + 3]]
        if index % 2 == 1:
            choices[0] = body[: body.index("\n", 1)]
        choices.insert(label, body)
        questions.append({"context": row["prompt"], "choices": choices, "label": label})
    # The best choice per byte is not the best one per character.
    questions.append({"context": "def f(x):", "choices": ["\n    return x\n\nqqqq", "\n    return xéééé"], "label": 1})
    pathlib.Path("questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return questions


@contextlib.contextmanager
def quiet():
    """Sends standard error to a file, which is shown if the harness fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open("harness.log", "w+") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            sys.stderr.write(pathlib.Path("harness.log").read_text())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


class Harness:
    """lm-evaluation-harness with two tasks of the same questions, and what it must find."""

    def __init__(self, checkpoint):
        self.questions = write_questions(checkpoint)
        pathlib.Path("tasks").mkdir()
        pathlib.Path("tasks/choices.yaml").write_text(MULTIPLE_CHOICE)
        pathlib.Path("tasks/bodies.yaml").write_text(GENERATION)
        pathlib.Path("tasks/texts.yaml").write_text(TEXTS)
        self.tasks = lm_eval.tasks.TaskManager(include_path="tasks", include_defaults=False)
        self.log_likelihoods = [[powerinfer.log_likelihood(question["context"], choice) for choice in question["choices"]] for question in self.questions]
        self.of_texts = [powerinfer.log_likelihood("", question["context"] + question["choices"][question["label"]]) for question in self.questions]
        # `eval` counts right answers; those of one question more tell whether it was right.
        rights = [(0, 0)]
        for count in range(1, len(self.questions) + 1):
            report = powerinfer.output("eval", "multiple-choice", "demo", "--data", "questions.jsonl", "--count", str(count), "--json")
            row = json.loads(report)["rows"][0]
            rights.append(tuple(round(row["right"][metric]["value"] * count) for metric in ("acc", "acc_norm")))
            assert row["asked"] == count
        self.rights = [[float(now - then) for now, then in zip(*pair)] for pair in zip(rights[1:], rights)]

    def bodies(self, tokens):
        """What `powerinfer run` writes after each context, up to the stop text."""
        for question in self.questions:
            text = powerinfer.output("run", "demo", "--device", "cpu", "-n", str(tokens), "--temperature", "0", "-p", question["context"])
            # A line break ends the output where the text has none.
            yield text.split("return")[0].strip()

    def run(self, tasks, model, arguments, **more):
        """Samples of tasks with a backend of the harness."""
        with quiet():
            results = lm_eval.simple_evaluate(
                model=model,
                model_args=arguments,
                tasks=tasks,
                task_manager=self.tasks,
                bootstrap_iters=0,
                log_samples=True,
                **more,
            )
        return [sorted(results["samples"][task], key=lambda sample: sample["doc_id"]) for task in tasks]

    def check(self, name, model, arguments, system_instruction=None, tokens=24):
        """Runs two tasks with a backend of the harness."""
        choices, bodies = self.run(["choices", "bodies"], model, arguments, system_instruction=system_instruction)
        found = [[response[0][0] for response in sample["resps"]] for sample in choices]
        check(f"{name}: log-likelihoods are those of `powerinfer logits`, to the last digit", found, self.log_likelihoods)
        # The harness divides by characters in `acc_norm`, and by bytes, as `powerinfer` does, in `acc_bytes`.
        found = [[sample["acc"], sample["acc_bytes"]] for sample in choices]
        check(f"{name}: `acc` and `acc_bytes` are `acc` and `acc_norm` of `powerinfer eval`", found, self.rights)
        found = [sample["resps"][0][0].strip() for sample in bodies]
        check(f"{name}: texts are those of `powerinfer run`", found, list(self.bodies(tokens)))

    def check_rolling(self, name, model, arguments):
        """Runs a task that scores whole texts."""
        [texts] = self.run(["texts"], model, arguments)
        found = [sample["resps"][0][0] for sample in texts]
        check(f"{name}: log-likelihoods of texts are those of `powerinfer logits`, to the last digit", found, self.of_texts)

    def check_chat(self, name, model, arguments, client):
        """Runs the task that writes text as a chat."""
        [bodies] = self.run(["bodies"], model, arguments, apply_chat_template=True)
        ask = lambda text: client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": text}], max_tokens=24, temperature=0, stop="return"
        )
        expected = [ask(question["context"]).choices[0].message.content for question in self.questions]
        check(f"{name}: texts are those of the `openai` package", [sample["resps"][0][0] for sample in bodies], expected)


powerinfer = PowerInfer(sys.argv[1])


def main():
    logging.disable(logging.WARNING)
    checkpoint = pathlib.Path(sys.argv[2])
    harness = Harness(checkpoint)
    with powerinfer.serve("demo.powerinfer", "--api-key", KEY) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        check_completions(client)
        check_errors(client, f"{address}/v1")
        asyncio.run(check_together(f"{address}/v1"))
        check_curl(address)
        # The harness sends token ids without the token that texts of this model begin with; the system instruction adds it.
        url = f"model=demo,base_url={address}/v1/completions"
        remote = f"{url},tokenizer_backend=remote,auth_token={KEY}"
        harness.check("lm_eval", "local-completions", remote, "<s>")
        harness.check("lm_eval, 4 requests at a time", "local-completions", f"{remote},num_concurrent=4", "<s>")
        harness.check("lm_eval, batches of 5", "local-completions", f"{remote},batch_size=5", "<s>")
        # The harness takes a first token whose id is 0 for none.
        harness.check_rolling("lm_eval", "local-completions", f"{remote},custom_prefix_token_id=0")
        local = f"{url},tokenizer_backend=huggingface,tokenizer={checkpoint},add_bos_token=True"
        harness.check("lm_eval, tokenizer of the checkpoint", "local-completions", local)
    # This backend sends no key, and no `max_tokens` for texts.
    with powerinfer.serve("demo.powerinfer") as address:
        harness.check("lm_eval, gguf", "gguf", f"base_url={address}", tokens=-1)
    with powerinfer.serve("chat.powerinfer", "--alias", "chat") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0)
        check_chat(client)
        harness.check_chat("lm_eval, chat", "local-chat-completions", f"model=chat,base_url={address}/v1/chat/completions", client)


if __name__ == "__main__":
    main()
