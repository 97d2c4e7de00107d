#!/bin/bash
cp /tests/test_calc.py /app
if python3 test_calc.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
