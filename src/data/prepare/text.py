"""Encodes prompts and decodes answers for generation. Reads JSON requests from stdin, one per line, and answers each by a line:

  {"model_dir": "...", "chat_template": "...",  ->  {"stop": [...], "template": true}     the first; tokens that end an answer.
   "date": "...", "plain": false}                   chat_template: in place of the model's; "": none. date: what templates are told
                                                    that ask; "": today's. plain: prompts are written without it
  {"prompt": "...", "system": "..."}            ->  {"ids": [...]}     a user's message, where there is a template and no "plain"; else
                                                                       plain text, as training writes a prompt. system: before it; "": none
  {"messages": [{"role": ..., "content": ...}]} ->  {"ids": [...]}     up to where the model speaks
  {"begin": true, "answer": 0}                  ->  {}                 an answer begins; those under way have different numbers
  {"next": 17, "answer": 0}                     ->  {"text": "..."}    of the answer what is certain with this token
  {"end": true, "answer": 0}                    ->  {"text": "..."}    the rest of it
  {"plain": "..."}                              ->  {"ids": [...]}     a text as it is, with the tokens that the tokenizer adds
  {"decode": [17, ...]}                         ->  {"text": "...", "pieces": ["...", ...]}   the tokens together, and each alone

Errors as prepare.py prints them; one of the first request ends the program with exit code 11."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

from decoding import Decoder  # noqa: E402
from errors import InputError  # noqa: E402


class Session:
    def __init__(self, model_dir, chat_template, date="", plain=False):
        from tokenise import Model, Options

        self.model = Model(model_dir, "all", options=Options(date=date), own_template=chat_template)
        self.plain = plain or self.model.template is None
        self.answers = {}  # those under way, by number

    def about(self):
        return {"stop": sorted(self.model.end_ids), "template": self.model.template is not None}

    def conversation(self, messages):
        import formats

        if self.model.template is None:
            rendered = self.model.render(formats.Chat(messages, None, 0), "the conversation")
            return self.model.tokenizer.encode(rendered.text).ids
        text = self.model.template.render(messages, add_generation_prompt=True)
        return self.model.tokenizer.encode(text, add_special_tokens=False).ids

    def reply(self, request):
        if "prompt" in request:
            prompt, system = request["prompt"], request.get("system", "")
            if self.plain:
                return {"ids": self.model.tokenizer.encode(f"{system}\n\n{prompt}" if system else prompt).ids}
            before = [{"role": "system", "content": system}] if system else []
            return {"ids": self.conversation([*before, {"role": "user", "content": prompt}])}
        if "messages" in request:
            return {"ids": self.conversation(request["messages"])}
        if "plain" in request:
            return {"ids": self.model.tokenizer.encode(request["plain"]).ids}
        if "decode" in request:
            return self.decoded(request["decode"])
        if "next" in request:
            return {"text": self.answers[request["answer"]].next(request["next"])}
        if "end" in request:
            return {"text": self.answers.pop(request["answer"]).end()}
        self.answers[request["answer"]] = Decoder(self.model.tokenizer)
        return {}

    def decoded(self, ids):
        def text(some):
            return self.model.tokenizer.decode(some, skip_special_tokens=False)

        return {"text": text(ids), "pieces": [text([one]) for one in ids]}


def main():
    session = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if session is None:
                session = Session(request["model_dir"], request["chat_template"], request.get("date", ""),
                                  request.get("plain", False))
                answer = session.about()
            else:
                answer = session.reply(request)
        except InputError as error:
            answer = error.as_json()
        except Exception as error:  # any error of a template
            answer = InputError(f"the chat template refuses this conversation: {error}",
                                next="rephrase it, or correct the model's template", area="DATA-23").as_json()
        print(json.dumps(answer), flush=True)
        if session is None:
            sys.exit(11)


if __name__ == "__main__":
    main()
