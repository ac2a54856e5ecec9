"""The progress of a target: a small JSON file in the run's directory, replaced atomically. {"id": the tracker's name for the run,
"step": of the last row that was sent, "parts": which rows of that step were sent}."""

import json
import os


class Place:
    def __init__(self, path):
        self.path = path
        self.id, self.step, self.parts = None, -1, []
        try:
            with open(path, encoding="utf-8") as file:
                read = json.load(file)
            self.id, self.step, self.parts = read["id"], int(read["step"]), list(read["parts"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path} cannot be read ({error}): starting over", flush=True)

    def sent(self, row):
        return row.step < self.step or (row.step == self.step and row.part in self.parts)

    def add(self, row):
        if row.step != self.step:
            self.step, self.parts = row.step, []
        self.parts.append(row.part)

    def write(self):
        new = self.path + ".new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump({"id": self.id, "step": self.step, "parts": self.parts}, file)
        os.replace(new, self.path)
