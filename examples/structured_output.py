"""Answers that follow a JSON schema, a regular expression or a grammar, beside an unconstrained
request.

The model is small and knows nothing: its answers are nonsense in the right form. Needs xgrammar:

    pip install -e ".[structured]" && python examples/structured_output.py
        [--train-seconds 15] [--quick]
"""

from __future__ import annotations

import argparse
import json
import re
import sys

import tiny_model  # before transformers: it sets the environment

import hf_paged

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["statement", "expression", "module"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 999},
        "is_error": {"type": "boolean"},
    },
    "required": ["kind", "line", "is_error"],
}
REGEX = r"(yes|no), because of (exceptions|names|objects)"
GRAMMAR = r"""root ::= item ("; " item){1,3}
item ::= [a-z]{2,6} " = " [0-9]{1,3}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny_model.add_arguments(parser, seconds=15)
    model, tokenizer = tiny_model.from_arguments(parser.parse_args())
    prompt = "An exception is raised at the point where the error is detected. "
    options = {"max_new_tokens": 160, "do_sample": True, "eos_token_id": tokenizer.eos_token_id}
    asked = {"schema": SCHEMA, "regex": REGEX, "grammar": GRAMMAR}
    with hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine:
        free = engine.add_request(prompt, {**options, "max_new_tokens": 24}, seed=0)
        ids = {
            engine.add_request(
                prompt, {**options, "num_return_sequences": 3}, seed=1, **{name: value}
            ): name
            for name, value in asked.items()
        }
        results = {}
        while engine.has_unfinished:
            results.update(
                (each.request_id, each.result) for each in engine.step() if each.result is not None
            )

    print(f"\nfree: {tiny_model.shown(results[free].text, 90)}")
    whole = dict.fromkeys(asked, 0)
    for request_id, name in ids.items():
        for sequence in results[request_id].sequences:
            print(f"{name}: {tiny_model.shown(sequence.text, 90)} ({sequence.finish_reason})")
            if sequence.finish_reason == "eos":  # otherwise it is cut off
                whole[name] += bool(follows(name, sequence.text))
    print(f"\ncomplete, and of the form that was asked for: {whole}")
    ended = sum(
        s.finish_reason == "eos" for request_id in ids for s in results[request_id].sequences
    )
    return 0 if 0 < ended == sum(whole.values()) else 1


def follows(name: str, text: str) -> bool:
    """Checks independently whether a text has the requested form."""
    if name == "schema":
        found = json.loads(text)
        return set(found) == set(SCHEMA["properties"]) and 1 <= found["line"] <= 999
    return (
        re.fullmatch(
            REGEX if name == "regex" else r"[a-z]{2,6} = \d{1,3}(; [a-z]{2,6} = \d{1,3}){1,3}", text
        )
        is not None
    )


if __name__ == "__main__":
    sys.exit(main())
