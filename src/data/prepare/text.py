"""Text to tokens and back for a quick look at a model. Reads one JSON request from stdin:

  {"model_dir": "...", "prompt": "...", "chat": true}  ->  {"ids": [...], "stop": [...]}
  {"model_dir": "...", "ids": [...]}                   ->  {"text": "..."}

`chat` renders the prompt as a user's message with the model's own template, if it has one; `stop` lists the tokens
that end an answer. Errors as prepare.py prints them, with exit code 11."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

from errors import InputError  # noqa: E402


def answer(request):
    from tokenise import Model

    model = Model(request["model_dir"], "all")
    if "ids" in request:
        return {"text": model.tokenizer.decode(request["ids"], skip_special_tokens=True)}
    stop = sorted(token for token in model.end_ids if token is not None)
    if request["chat"] and model.template is not None:
        text = model.template.render([{"role": "user", "content": request["prompt"]}], add_generation_prompt=True)
        return {"ids": model.tokenizer.encode(text, add_special_tokens=False).ids, "stop": stop}
    return {"ids": model.tokenizer.encode(request["prompt"]).ids, "stop": stop}


def main():
    try:
        print(json.dumps(answer(json.load(sys.stdin))))
    except InputError as error:
        print(json.dumps(error.as_json()))
        sys.exit(11)


if __name__ == "__main__":
    main()
