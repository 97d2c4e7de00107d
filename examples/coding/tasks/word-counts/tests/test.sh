#!/bin/bash
cp /tests/test_words.py /app
if python3 test_words.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
