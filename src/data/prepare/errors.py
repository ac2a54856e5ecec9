"""The one family of errors of the preparation: main turns it into JSON for the program that called."""


class InputError(Exception):
    """`area` is the failure's tag, `place` a file:line, `next` what to do about it."""

    def __init__(self, what, place="", next="", area="DATA-24"):
        super().__init__(what)
        self.area, self.what, self.place, self.next = area, what, place, next

    def as_json(self):
        return {"error": {"area": self.area, "what": self.what, "place": self.place, "next": self.next}}
