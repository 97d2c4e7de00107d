#!/bin/bash
cp /tests/test_stats.py /app
if python3 test_stats.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
