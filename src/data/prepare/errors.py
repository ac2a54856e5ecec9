"""The one family of errors of the preparation: main turns it into JSON for the calling program."""


class InputError(Exception):
    """`area` is the failure's tag, `place` a file:line, `next` the remedy, `kept` what is not lost."""

    def __init__(self, what, place="", next="", area="DATA-24", kept=""):
        super().__init__(what)
        self.area, self.what, self.place, self.next, self.kept = area, what, place, next, kept

    def as_json(self):
        return {"error": {"area": self.area, "what": self.what, "place": self.place, "next": self.next, "kept": self.kept}}


class LimitError(InputError):
    """A chat template or a tokenizer exceeds every plausible limit: not the fault of a row, so none is skipped for it."""
