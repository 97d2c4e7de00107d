"""DSPy's first program."""

import sys

import dspy

dspy.configure(lm=dspy.LM("openai/gpt-4o-mini"))
math = dspy.ChainOfThought("question -> answer: float")
print(math(question=sys.argv[1]).answer)
