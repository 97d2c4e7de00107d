#!/bin/bash
cp /tests/test_calendars.py /app
if python3 test_calendars.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
