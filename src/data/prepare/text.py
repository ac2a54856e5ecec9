"""Text to tokens and back while a model is talked to. Reads JSON requests from stdin, one on each line, and answers each by a line:

  {"model_dir": "...", "chat_template": "..."}  ->  {"stop": [...], "template": true}     the first; tokens that end an answer.
                                                    chat_template: in place of the model's; "": none
  {"prompt": "..."}                             ->  {"ids": [...]}     a user's message, where there is a template; else plain text
  {"messages": [{"role": ..., "content": ...}]} ->  {"ids": [...]}     up to where the model speaks
  {"begin": true}                               ->  {}                 an answer begins
  {"next": 17}                                  ->  {"text": "..."}    of the answer what is certain with this token
  {"end": true}                                 ->  {"text": "..."}    the rest of it

A character may consist of several tokens: while the text ends with a replacement character it waits for more. Errors as
prepare.py prints them; one of the first request ends the program with exit code 11."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

from errors import InputError  # noqa: E402

UNFINISHED = "\ufffd"


class Answer:
    """Tokens [start, told) gave the text that was told last: what new ones add is seen beside them, since a decoder may treat a
    text's first token in its own way."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.start, self.told = tokenizer, [], 0, 0

    def next(self, token):
        self.ids.append(token)
        return self._tell(lambda text: not text.endswith(UNFINISHED))

    def end(self):
        return self._tell(lambda text: True)

    def _tell(self, certain):
        before, now = self._decode(self.start, self.told), self._decode(self.start, len(self.ids))
        if len(now) <= len(before) or not certain(now):
            return ""
        self.start, self.told = self.told, len(self.ids)
        return now[len(before):]

    def _decode(self, first, last):
        return self.tokenizer.decode(self.ids[first:last], skip_special_tokens=True)


class Session:
    def __init__(self, model_dir, chat_template):
        from tokenise import Model

        self.model = Model(model_dir, "all", own_template=chat_template)
        self.answer = None

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
            if self.model.template is None:
                return {"ids": self.model.tokenizer.encode(request["prompt"]).ids}
            return {"ids": self.conversation([{"role": "user", "content": request["prompt"]}])}
        if "messages" in request:
            return {"ids": self.conversation(request["messages"])}
        if "next" in request:
            return {"text": self.answer.next(request["next"])}
        if "end" in request:
            return {"text": self.answer.end()}
        self.answer = Answer(self.model.tokenizer)
        return {}


def main():
    import jinja2

    session = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if session is None:
                session = Session(request["model_dir"], request["chat_template"])
                answer = session.about()
            else:
                answer = session.reply(request)
        except InputError as error:
            answer = error.as_json()
        except (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError) as error:
            answer = InputError(f"the chat template refuses this conversation: {error}",
                                next="say it otherwise, or correct the model's template", area="DATA-23").as_json()
        print(json.dumps(answer), flush=True)
        if session is None:
            sys.exit(11)


if __name__ == "__main__":
    main()
