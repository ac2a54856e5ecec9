"""Writes tests/emulator/counters.txt from what emulator_counters_test counts now: for steps that have become cheaper, or a changed
kernel; read the difference before you commit it.

Run: python tests/emulator/update_counters.py BUILD
"""

import re
import subprocess
import sys
from pathlib import Path

table = Path(__file__).with_name("counters.txt")
run = subprocess.run([f"{sys.argv[1]}/emulator/bin/emulator_counters_test", "--gtest_filter=*Table*"], capture_output=True, text=True)
found = re.search(r'Which is: "((?:full|lora)[^"]*)"\n', run.stdout)
if found:
    head = [line for line in table.read_text().splitlines() if line.startswith("#")]
    table.write_text("\n".join(head) + "\n" + found[1].replace("\\n", "\n"))
print("written" if found else f"nothing to write: the test's exit code is {run.returncode}")
