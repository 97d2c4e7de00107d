#!/bin/bash
cp /tests/test_intervals.py /app
if python3 test_intervals.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
