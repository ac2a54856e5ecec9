"""Streaming decoding of tokens to text."""

UNFINISHED = "\ufffd"


class Decoder:
    """Returns the complete text with each token: a character may consist of several tokens, so text that ends with a replacement
    character waits for more. Tokens [start, told) gave the text returned last: new tokens are decoded after them, since a decoder
    may treat a text's first token differently."""

    def __init__(self, tokenizer, skip_special_tokens=True):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.ids, self.start, self.told = [], 0, 0

    def next(self, token):
        self.ids.append(token)
        return self._tell(lambda text: not text.endswith(UNFINISHED))

    def end(self):
        """The remaining text."""
        return self._tell(lambda text: True)

    def _tell(self, certain):
        before, now = self._decode(self.start, self.told), self._decode(self.start, len(self.ids))
        if len(now) <= len(before) or not certain(now):
            return ""
        self.start, self.told = self.told, len(self.ids)
        return now[len(before):]

    def _decode(self, first, last):
        return self.tokenizer.decode(self.ids[first:last], skip_special_tokens=self.skip)
