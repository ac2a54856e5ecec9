"""The one family of errors of a fetch: main turns it into JSON for the calling program. Exit codes are lmlaunch's."""

INPUT, DOES_NOT_FIT, NO_SPACE, IO, INTEGRITY = 11, 12, 20, 21, 22
AREA = "HUB-37"


class FetchError(Exception):
    """`place` is a file or an address, `next` the remedy, `kept` what is not lost."""

    def __init__(self, exit, what, place="", next="", kept=""):
        super().__init__(what)
        self.exit, self.what, self.place, self.next, self.kept = exit, what, place, next, kept

    def as_json(self):
        return {"exit": self.exit, "what": self.what, "place": self.place, "next": self.next, "kept": self.kept}
