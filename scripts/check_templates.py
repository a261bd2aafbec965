"""Renders the corpus of chat templates as transformers does, and compares the results with the stored ones.

usage: check_templates.py [--write]

`--write` stores the results, of which a test of `powerinfer-text` expects the same.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

CORPUS = pathlib.Path(__file__).parent.parent / "crates/text/tests/templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("called"), [], [], body).set_lineno(line)

    def called(self, caller):
        return caller()


class Refused(Exception):
    """A template called `raise_exception`."""


def raise_exception(message):
    raise Refused(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    """The environment of transformers' `apply_chat_template`."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return made


def rendered(template, conversation):
    """A text, or why there is none."""
    try:
        compiled = environment().from_string(template)
        return compiled.render(tools=None, documents=None, **conversation, **TOKENS)
    except Refused as refusal:
        return {"refused": str(refusal)}
    except Exception:
        return {"failed": True}


def main():
    conversations = json.loads((CORPUS / "conversations.json").read_text())
    lines = (CORPUS / "features.txt").read_text().splitlines()
    features = [line for line in lines if line and not line.startswith("# ")]
    results = {
        "features": [rendered(line, conversations["talk"]) for line in features],
        "families": {
            path.stem: {name: rendered(path.read_text(), talk) for name, talk in conversations.items()}
            for path in sorted(CORPUS.glob("families/*.jinja"))
        },
    }
    stored = CORPUS / "expected.json"
    if sys.argv[1:] == ["--write"]:
        stored.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n")
        return
    expected = json.loads(stored.read_text())
    different = [line for line, *both in zip(features, expected["features"], results["features"]) if both[0] != both[1]]
    different += [name for name, texts in results["families"].items() if texts != expected["families"].get(name)]
    for name in different:
        print(f"different: {name}", file=sys.stderr)
    if different or expected.keys() != results.keys() or len(expected["features"]) != len(features):
        sys.exit("error: jinja2 renders the corpus of chat templates differently; see `check_templates.py --write`")
    print(f"{len(features)} features and {len(results['families'])} families render as stored")


main()
