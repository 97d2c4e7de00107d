#!/bin/bash
cp /tests/test_roman.py /app
if python3 test_roman.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
