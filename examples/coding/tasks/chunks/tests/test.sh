#!/bin/bash
cp /tests/test_lists.py /app
if python3 test_lists.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
