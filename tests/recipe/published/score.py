"""Run an agent that reports no reward, and print how close the last line of its output is to an answer, from 0 to 1.

python score.py ANSWER COMMAND...
"""

import difflib
import subprocess
import sys

answer, *command = sys.argv[1:]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
said = (done.stdout.strip() or " ").splitlines()[-1]
print(said)
print(round(difflib.SequenceMatcher(None, answer, said, autojunk=False).ratio(), 4))
sys.exit(done.returncode)
